"""Phi-3 and Phi-4: q, k and v are one foreign module, gate and up another."""

from dataclasses import replace

from checkpointing.families.decoder import (
    HF_DEFAULTS,
    HF_LAYER,
    LAYER,
    decoder_modules,
    hf_rules,
)
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Rule

_FUSED = {
    LAYER + "attn.q_proj": ("self_attn.qkv_proj", 0),
    LAYER + "attn.k_proj": ("self_attn.qkv_proj", 1),
    LAYER + "attn.v_proj": ("self_attn.qkv_proj", 2),
    LAYER + "mlp.w1": ("mlp.gate_up_proj", 0),
    LAYER + "mlp.w3": ("mlp.gate_up_proj", 1),
}

PHI3 = Family(
    name="phi3",
    modules=decoder_modules(),
    formats={
        "hf": tuple(
            replace(rule, foreign=HF_LAYER + _FUSED[rule.native][0], part=_FUSED[rule.native][1])
            if isinstance(rule, Rule) and rule.native in _FUSED
            else rule
            for rule in hf_rules()
        )
    },
    hf_defaults={
        **HF_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
    },
    # Names that LongRoPE had in the first releases.
    hf_aliases={"rope_type": {"su": "longrope", "yarn": "longrope"}},
    rotates_halves=True,
)
