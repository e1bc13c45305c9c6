"""OLMo 2: norms after attention and feed-forward, and over all heads of the queries and keys."""

from checkpointing.families.decoder import (
    FUSED_IN_ENGINES,
    HF_DEFAULTS,
    decoder_modules,
    hf_rules,
)
from checkpointing.mapping.family import Family

_NORMS = {
    "sa_scale": "post_attention_layernorm",
    "mlp_scale": "post_feedforward_layernorm",
}

OLMO2 = Family(
    name="olmo2",
    modules=decoder_modules(norms=_NORMS, query_norm="query", key_norm="key_value"),
    formats={"hf": hf_rules(norms=_NORMS, qk_norm=True)},
    hf_defaults={**HF_DEFAULTS, "rms_norm_eps": 1e-5},
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
)
