"""Qwen 2 and 2.5, and Qwen 3."""

from checkpointing.families.decoder import (
    FUSED_IN_ENGINES,
    HF_DEFAULTS,
    decoder_modules,
    hf_rules,
)
from checkpointing.mapping.family import Family

_DEFAULTS = {
    **HF_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Family(
    name="qwen2",
    modules=decoder_modules(output_bias=""),
    formats={"hf": hf_rules()},
    # Its q, k and v always have biases, and config.json does not say so.
    hf_defaults={**_DEFAULTS, "attention_bias": True},
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
)

QWEN3 = Family(
    name="qwen3",
    modules=decoder_modules(query_norm="head_dim", key_norm="head_dim"),
    formats={"hf": hf_rules(qk_norm=True)},
    hf_defaults={**_DEFAULTS, "head_dim": 128},
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
)
