"""Tiny models of transformers, and their weights in native names, mapped here by hand."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.mapping.rope_scaling import Llama3RopeScaling, YarnRopeScaling

DIMS = Dims(layers=3, vocab=131, hidden=42, ffn=56, heads=6, kv_heads=2, head_dim=14)

MODULES = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "mlp.w1",
    "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3",
}


def config(**changes: Any) -> ModelConfig:
    """A small native config; every size differs from every other."""
    dims = {key: changes.pop(key) for key in list(changes) if hasattr(DIMS, key)}
    base = ModelConfig("llama", replace(DIMS, **dims), 1e-5, 10000.0, None, 512)
    return replace(base, **changes)


def hf_model(cfg: ModelConfig) -> torch.nn.Module:
    """The same model in transformers, with random weights in fp32, biases and norms too."""
    dims = cfg.dims
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if isinstance(cfg.rope_scaling, YarnRopeScaling):
        rope |= {
            "rope_type": "yarn",
            "factor": cfg.rope_scaling.factor,
            "original_max_position_embeddings": cfg.rope_scaling.original_max_seq_len,
        }
    if isinstance(cfg.rope_scaling, Llama3RopeScaling):
        rope |= {
            "rope_type": "llama3",
            "factor": cfg.rope_scaling.factor,
            "low_freq_factor": cfg.rope_scaling.low_freq_factor,
            "high_freq_factor": cfg.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": cfg.rope_scaling.original_max_seq_len,
        }
    sizes = {
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_seq_len,
        "rope_parameters": rope,
        "tie_word_embeddings": dims.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(7)
    if cfg.family == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=cfg.sliding_window))
    else:
        biases = {"attention_bias": dims.attention_bias, "mlp_bias": dims.mlp_bias}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **biases))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * spread)
            else:
                parameter.copy_(0.2 * spread)
    return model.float().eval()


def pairs_from_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of a q or k tensor from Hugging Face's order within a head to Meta's."""
    rows = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(tensor.shape[0] // head_dim)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return tensor[rows]


def native_name(name: str) -> str:
    """The native name of a tensor of transformers, or of PEFT's model of it."""
    name = name.removeprefix("base_model.model.").removeprefix("model.")
    name = name.replace("embed_tokens", "tok_embeddings").replace("lm_head", "output")
    for foreign, native in MODULES.items():
        name = name.replace(foreign, native)
    name = name.replace("post_attention_layernorm.weight", "mlp_norm.scale")
    name = name.replace("input_layernorm.weight", "sa_norm.scale")
    return "norm.scale" if name == "norm.weight" else name


def native_weights(model: torch.nn.Module, cfg: ModelConfig) -> dict[str, Tensor]:
    """Weights of a model of transformers in native names and order."""
    weights = {}
    for name, tensor in model.state_dict().items():
        native = native_name(name)
        if ".q_proj." in native or ".k_proj." in native:
            tensor = pairs_from_halves(tensor, cfg.dims.head_dim)
        weights[native] = tensor.detach().clone()
    if cfg.dims.tied:
        del weights["output.weight"]
    return weights


def tokens(batch: int = 3, length: int = 37) -> Tensor:
    """Random token ids."""
    return torch.randint(0, DIMS.vocab, (batch, length), generator=torch.Generator().manual_seed(3))
