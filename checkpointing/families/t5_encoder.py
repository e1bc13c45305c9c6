"""The encoder of T5 1.1 (Raffel et al. 2020; gated feed-forward), by torchtune's native names."""

from dataclasses import dataclass

from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.rules import Dropped, Rule, linear, norm, table

_LAYER = "layers.{layer}."
_HF_LAYER = "encoder.block.{layer}."
_HF_ATTENTION = _HF_LAYER + "layer.0.SelfAttention."
_HF_MLP = _HF_LAYER + "layer.1.DenseReluDense."
EMBEDDING_COPY = "encoder.embed_tokens.weight"
"""What transformers ties to the embedding; some files hold it a second time under this name."""


@dataclass(frozen=True, kw_only=True)
class T5Dims(Dims):
    """Sizes of a T5 encoder.

    Attributes:
        buckets: distances between tokens that have a bias of their own.
    """

    buckets: int


T5_ENCODER = Family(
    name="t5",
    modules=(
        table("token_embedding", "vocab", "hidden"),
        table("relative_position_bias.embedding", "buckets", "heads"),
        norm(_LAYER + "sa_norm", "hidden"),
        linear(_LAYER + "attn.q_proj", "query", "hidden"),
        linear(_LAYER + "attn.k_proj", "key_value", "hidden"),
        linear(_LAYER + "attn.v_proj", "key_value", "hidden"),
        linear(_LAYER + "attn.output_proj", "hidden", "query"),
        norm(_LAYER + "mlp_norm", "hidden"),
        linear(_LAYER + "mlp.w1", "ffn", "hidden"),
        linear(_LAYER + "mlp.w2", "hidden", "ffn"),
        linear(_LAYER + "mlp.w3", "ffn", "hidden"),
        norm("final_norm", "hidden"),
    ),
    formats={
        "hf": (
            Rule("token_embedding", "shared"),
            # All layers share the bias, and the first one stores it.
            Rule(
                "relative_position_bias.embedding",
                _HF_ATTENTION.format(layer=0) + "relative_attention_bias",
            ),
            Rule(_LAYER + "sa_norm", _HF_LAYER + "layer.0.layer_norm"),
            Rule(_LAYER + "attn.q_proj", _HF_ATTENTION + "q"),
            Rule(_LAYER + "attn.k_proj", _HF_ATTENTION + "k"),
            Rule(_LAYER + "attn.v_proj", _HF_ATTENTION + "v"),
            Rule(_LAYER + "attn.output_proj", _HF_ATTENTION + "o"),
            Rule(_LAYER + "mlp_norm", _HF_LAYER + "layer.1.layer_norm"),
            Rule(_LAYER + "mlp.w1", _HF_MLP + "wi_0"),
            Rule(_LAYER + "mlp.w2", _HF_MLP + "wo"),
            Rule(_LAYER + "mlp.w3", _HF_MLP + "wi_1"),
            Rule("final_norm", "encoder.final_layer_norm"),
            Dropped(EMBEDDING_COPY),
        )
    },
    hf_defaults={
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "n_positions": 512,
    },
    # Nothing is rotated.
    hf_rotates_halves=False,
    hf_class="T5EncoderModel",
    in_peft=False,
)
