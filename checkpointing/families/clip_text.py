"""The text encoder of CLIP (Radford et al. 2021), by torchtune's native names."""

from dataclasses import dataclass

from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.rules import (
    Dropped,
    Module,
    Parameter,
    Rule,
    biased_linear,
    layer_norm,
    table,
)

_LAYER = "layers.{layer}."
_HF = "text_model."
_HF_LAYER = _HF + "encoder.layers.{layer}."


@dataclass(frozen=True, kw_only=True)
class ClipTextDims(Dims):
    """Sizes of a CLIP text encoder.

    Attributes:
        positions: rows of the table of positions.
    """

    positions: int


CLIP_TEXT = Family(
    name="clip_text_model",
    modules=(
        table("token_embedding", "vocab", "hidden"),
        Module(
            "position_embedding", "hidden", "", (Parameter("", "weight", ("positions", "out")),)
        ),
        layer_norm(_LAYER + "sa_norm", "hidden"),
        biased_linear(_LAYER + "attn.q_proj", "query", "hidden"),
        biased_linear(_LAYER + "attn.k_proj", "key_value", "hidden"),
        biased_linear(_LAYER + "attn.v_proj", "key_value", "hidden"),
        biased_linear(_LAYER + "attn.output_proj", "hidden", "query"),
        layer_norm(_LAYER + "mlp_norm", "hidden"),
        biased_linear(_LAYER + "mlp.w1", "ffn", "hidden"),
        biased_linear(_LAYER + "mlp.w2", "hidden", "ffn"),
        layer_norm("final_norm", "hidden"),
    ),
    formats={
        "hf": (
            Rule("token_embedding", _HF + "embeddings.token_embedding"),
            Rule("position_embedding", _HF + "embeddings.position_embedding"),
            Rule(_LAYER + "sa_norm", _HF_LAYER + "layer_norm1"),
            Rule(_LAYER + "attn.q_proj", _HF_LAYER + "self_attn.q_proj"),
            Rule(_LAYER + "attn.k_proj", _HF_LAYER + "self_attn.k_proj"),
            Rule(_LAYER + "attn.v_proj", _HF_LAYER + "self_attn.v_proj"),
            Rule(_LAYER + "attn.output_proj", _HF_LAYER + "self_attn.out_proj"),
            Rule(_LAYER + "mlp_norm", _HF_LAYER + "layer_norm2"),
            Rule(_LAYER + "mlp.w1", _HF_LAYER + "mlp.fc1"),
            Rule(_LAYER + "mlp.w2", _HF_LAYER + "mlp.fc2"),
            Rule("final_norm", _HF + "final_layer_norm"),
            Dropped(_HF + "embeddings.position_ids"),
        )
    },
    hf_defaults={
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    # Nothing is rotated.
    hf_rotates_halves=False,
    hf_base=_HF,
    hf_class="CLIPTextModel",
    in_peft=False,
)
