"""SmolLM3: every fourth layer has no positions."""

from checkpointing.families.decoder import (
    FUSED_IN_ENGINES,
    HF_DEFAULTS,
    decoder_modules,
    hf_rules,
)
from checkpointing.mapping.family import Family

SMOLLM3 = Family(
    name="smollm3",
    modules=decoder_modules(),
    formats={"hf": hf_rules()},
    hf_defaults={
        **HF_DEFAULTS,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
)
