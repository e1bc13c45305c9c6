"""A tiny model of transformers for every family, and for what its config can switch."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

# Every size differs from every other, and the width of a head is not hidden / heads.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MIXTRAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.5, 5.0, 9.0],
    "partial_rotary_factor": 0.8,
}
# transformers wants a factor for each pair of a head of hidden / heads elements in Phi-3.
PHI3_SIZES = {"hidden_size": 60, "head_dim": 10}

SLIDING = {"use_sliding_window": True, "sliding_window": 7}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, every head its own key": ("llama", {"num_key_value_heads": 6}),
    "llama, positions scaled linearly": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama, positions scaled beyond the context": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama, yarn as in DeepSeek": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}},
    ),
    "llama, longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 5.0,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1],
                "long_factor": [1.2, 2.5, 5.0, 9.0, 10.0, 11.0, 12.0],
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 9}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", MIXTRAL_EXPERTS),
    "mixtral, window": ("mixtral", {**MIXTRAL_EXPERTS, "sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, window": ("qwen3", {**SLIDING, "max_window_layers": 2}),
    "qwen3, yarn with all its settings": (
        "qwen3",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 6.0,
                "beta_slow": 1.5,
                "truncate": False,
                "attention_factor": 1.3,
            }
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        {**QWEN_EXPERTS, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "llama_classifier": ("llama_classifier", {"num_labels": 3}),
    "mistral_classifier, one label": ("mistral_classifier", {"num_labels": 1}),
    "qwen2_classifier, tied": (
        "qwen2_classifier",
        {"num_labels": 3, "tie_word_embeddings": True},
    ),
    "qwen3_classifier": ("qwen3_classifier", {"num_labels": 5}),
    "gemma": ("gemma", {}),
    "gemma, untied": ("gemma", {"tie_word_embeddings": False}),
    "gemma2": ("gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 20}),
    "gemma2, low caps": (
        "gemma2",
        {"sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2, no caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
    ),
    "gemma3, no layer with full attention": ("gemma3_text", {"sliding_window": 7}),
    "gemma3, no layer with a window": (
        "gemma3_text",
        {"sliding_window": 7, "sliding_window_pattern": 1},
    ),
    "gemma3, scaled positions, cap and biases": (
        "gemma3_text",
        {
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            # transformers does not compute it.
            "attn_logit_softcapping": 2.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "phi3, window, partly rotated": (
        "phi3",
        {
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 4 / 7,
            },
        },
    ),
    "phi3, longrope, rows in the original context": (
        "phi3",
        {
            **PHI3_SIZES,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            # As in Phi-4-mini.
            "tie_word_embeddings": True,
        },
    ),
    "phi3, longrope, rows beyond it": (
        "phi3",
        {
            **PHI3_SIZES,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3, window in layers without positions": (
        "smollm3",
        {**SLIDING, "no_rope_layer_interval": 2},
    ),
    "smollm3, window": ("smollm3", {**SLIDING, "no_rope_layers": [1, 0, 1]}),
}


# The default implementation of experts in transformers is for fp32 and shorter.
IN_FP64 = {"experts_implementation": "eager"}


def peer(name: str) -> nn.Module:
    """The model in transformers, with random weights in fp32; nothing in it is zero or one."""
    model_type, options = VARIANTS[name]
    return random_model(model_type, {**SIZES, **options})


def random_model(model_type: str, options: dict[str, Any]) -> nn.Module:
    """A model of transformers with random weights in fp32."""
    torch.manual_seed(7)
    base, is_classifier, _ = model_type.partition("_classifier")
    config = AutoConfig.for_model(base, **options)
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    model = kind.from_config(config, **IN_FP64)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            is_norm = parameter_name.endswith("norm.weight")
            offset = 0 if model_type.startswith("gemma") else 1
            parameter.copy_(offset + 0.1 * spread if is_norm else 0.2 * spread)
    return model.float().eval()


def write(name: str, directory: Path) -> nn.Module:
    """The same, saved in a directory."""
    model = peer(name)
    model.save_pretrained(directory)
    return model


def tokens(batch: int = 2, length: int = 23) -> torch.Tensor:
    """Random token ids, longer than every sliding window."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator)


def compared(logits: torch.Tensor, peer: torch.Tensor) -> torch.Tensor:
    """Differences to the logits of transformers, whose classifiers give the last token's alone."""
    return (logits[:, -1] if peer.dim() < logits.dim() else logits) - peer
