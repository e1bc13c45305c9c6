"""A tiny model of transformers for every family, and for what its config can switch."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

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

SLIDING = {"use_sliding_window": True, "sliding_window": 7}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, every head its own key": ("llama", {"num_key_value_heads": 6}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, window": ("qwen3", {**SLIDING, "max_window_layers": 2}),
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
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3, window in layers without positions": (
        "smollm3",
        {**SLIDING, "no_rope_layer_interval": 2},
    ),
    "smollm3, window": ("smollm3", {**SLIDING, "no_rope_layers": [1, 0, 1]}),
}


def peer(name: str) -> nn.Module:
    """The model in transformers, with random weights in fp32; nothing in it is zero or one."""
    model_type, options = VARIANTS[name]
    return random_model(model_type, {**SIZES, **options})


def random_model(model_type: str, options: dict[str, Any]) -> nn.Module:
    """A model of transformers with random weights in fp32."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options))
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
