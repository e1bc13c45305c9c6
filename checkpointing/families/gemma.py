"""Gemma, Gemma 2, and the text models of Gemma 3."""

from checkpointing.families.decoder import (
    FUSED_IN_ENGINES,
    HF_DEFAULTS,
    decoder_modules,
    hf_rules,
)
from checkpointing.mapping.family import Family

_DEFAULTS = {
    **HF_DEFAULTS,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
}

GEMMA = Family(
    name="gemma",
    modules=decoder_modules(),
    formats={"hf": hf_rules(permuted=True)},
    hf_defaults={**_DEFAULTS, "num_key_value_heads": 16},
    # The first releases said "gelu" and meant the approximation by tanh.
    hf_aliases={"hidden_act": {"gelu": "gelu_pytorch_tanh"}},
    fused_in_engines=FUSED_IN_ENGINES,
    norm_offset=1.0,
    scaled_embedding=True,
)

# torchtune swaps the two norms of the feed-forward layer, which changes what it computes; here
# mlp_norm comes before the layer and mlp_scale after it.
_FOUR_NORMS = {
    "sa_norm": "input_layernorm",
    "sa_scale": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_scale": "post_feedforward_layernorm",
}

GEMMA2 = Family(
    name="gemma2",
    modules=decoder_modules(norms=_FOUR_NORMS),
    formats={"hf": hf_rules(norms=_FOUR_NORMS, permuted=True)},
    hf_defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "layer_types_cycle": ("sliding_attention", "full_attention"),
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fused_in_engines=FUSED_IN_ENGINES,
    norm_offset=1.0,
    scaled_embedding=True,
)

GEMMA3 = Family(
    name="gemma3_text",
    modules=decoder_modules(norms=_FOUR_NORMS, query_norm="head_dim", key_norm="head_dim"),
    formats={"hf": hf_rules(norms=_FOUR_NORMS, qk_norm=True)},
    hf_defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
    },
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
    norm_offset=1.0,
    scaled_embedding=True,
)
