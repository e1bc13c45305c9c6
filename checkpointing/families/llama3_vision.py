"""Llama 3.2 Vision: a decoder with cross-attention to the tiles of an image, and their encoder.

Native names are torchtune's. Hugging Face counts the layers with cross-attention among all layers;
natively each is the ``fusion_layer`` of the layer that follows it.
"""

from dataclasses import dataclass, replace

from checkpointing.families.decoder import decoder_modules, hf_rules
from checkpointing.families.llama3_vision_encoder import (
    ENCODER_MODULES,
    GATE,
    HF_ENCODER_RULES,
)
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims
from checkpointing.mapping.rules import LAYER, Module, Rule, linear, norm, table


@dataclass(frozen=True, kw_only=True)
class VisionDims(Dims):
    """Sizes of a Llama 3.2 Vision model; those that ``Dims`` has are the decoder's.

    Attributes:
        layers: number of layers with self-attention.
        cross_attention_layers: Hugging Face's numbers of the layers with cross-attention.
        special_tokens: rows of the embedding beyond the vocabulary.
        vision_layers: number of layers of the encoder.
        global_layers: number of further ones, of the projection.
        vision_hidden: width of the encoder.
        vision_ffn: width of its feed-forward layers.
        vision_features: what the encoder hands to the projection for each token: its last hidden
            state and some earlier ones.
        channels: of an image.
        patch: side of a patch, in pixels.
        tokens: of a tile: its patches and one for the class.
        tiles: largest number of tiles of an image.
        aspect_ratios: shapes of grids of tiles, each (rows, columns).
    """

    cross_attention_layers: tuple[int, ...]
    special_tokens: int
    vision_layers: int
    global_layers: int
    vision_hidden: int
    vision_ffn: int
    vision_features: int
    channels: int
    patch: int
    tokens: int
    tiles: int
    aspect_ratios: tuple[tuple[int, int], ...]

    @property
    def hf_layers(self) -> tuple[int, ...]:
        """Hugging Face's numbers of the layers with self-attention."""
        everything = range(self.layers + len(self.cross_attention_layers))
        return tuple(layer for layer in everything if layer not in self.cross_attention_layers)

    @property
    def fusion_layers(self) -> tuple[int, ...]:
        """Native numbers of the layers with cross-attention."""
        return tuple(layer - count for count, layer in enumerate(self.cross_attention_layers))

    @property
    def all_vision_layers(self) -> tuple[int, ...]:
        """Numbers of the encoder's layers."""
        return tuple(range(self.vision_layers))

    @property
    def all_global_layers(self) -> tuple[int, ...]:
        """Numbers of the projection's layers."""
        return tuple(range(self.global_layers))

    @property
    def one(self) -> int:
        """Length of a gate, and number of tokens of a tile that has only one embedding."""
        return 1

    @property
    def lists(self) -> int:
        """Rows of a table of tiles in Hugging Face's layout, one of them for no image."""
        return 1 + len(self.aspect_ratios)

    @property
    def tile_list(self) -> int:
        """Length of such a row that has one embedding for each tile."""
        return self.tiles * self.vision_hidden

    @property
    def token_list(self) -> int:
        """Length of such a row that has one for each token of each tile."""
        return self.tiles * self.tokens * self.vision_hidden


_DECODER = "decoder."
_FUSION = "decoder.layers.{layer}.fusion_layer."
_HF_TEXT = "language_model."
_HF_FUSION = "language_model.model.layers.{layer}."

_DECODER_MODULES = tuple(
    replace(module, name=_DECODER + module.name) for module in decoder_modules()
)

_FUSION_MODULES = tuple(
    replace(module, layers="fusion_layers")
    for module in (
        norm(_FUSION + "ca_norm", "hidden"),
        linear(_FUSION + "attn.q_proj", "query", "hidden"),
        linear(_FUSION + "attn.k_proj", "key_value", "hidden"),
        linear(_FUSION + "attn.v_proj", "key_value", "hidden"),
        linear(_FUSION + "attn.output_proj", "hidden", "query"),
        norm(_FUSION + "attn.q_norm", "head_dim"),
        norm(_FUSION + "attn.k_norm", "head_dim"),
        Module(_FUSION + "ca_scale", "one", "", (GATE,)),
        norm(_FUSION + "mlp_norm", "hidden"),
        linear(_FUSION + "mlp.w1", "ffn", "hidden"),
        linear(_FUSION + "mlp.w2", "hidden", "ffn"),
        linear(_FUSION + "mlp.w3", "ffn", "hidden"),
        Module(_FUSION + "mlp_scale", "one", "", (GATE,)),
    )
)

_HF_FUSION_RULES = tuple(
    replace(rule, layers="cross_attention_layers")
    for rule in (
        Rule(_FUSION + "ca_norm", _HF_FUSION + "input_layernorm"),
        Rule(_FUSION + "attn.q_proj", _HF_FUSION + "cross_attn.q_proj"),
        Rule(_FUSION + "attn.k_proj", _HF_FUSION + "cross_attn.k_proj"),
        Rule(_FUSION + "attn.v_proj", _HF_FUSION + "cross_attn.v_proj"),
        Rule(_FUSION + "attn.output_proj", _HF_FUSION + "cross_attn.o_proj"),
        Rule(_FUSION + "attn.q_norm", _HF_FUSION + "cross_attn.q_norm"),
        Rule(_FUSION + "attn.k_norm", _HF_FUSION + "cross_attn.k_norm"),
        Rule(_FUSION + "ca_scale", _HF_FUSION + "cross_attn_attn_gate"),
        Rule(_FUSION + "mlp_norm", _HF_FUSION + "post_attention_layernorm"),
        Rule(_FUSION + "mlp.w1", _HF_FUSION + "mlp.gate_proj"),
        Rule(_FUSION + "mlp.w2", _HF_FUSION + "mlp.down_proj"),
        Rule(_FUSION + "mlp.w3", _HF_FUSION + "mlp.up_proj"),
        Rule(_FUSION + "mlp_scale", _HF_FUSION + "cross_attn_mlp_gate"),
    )
)

_EMBEDDING = _DECODER + "tok_embeddings"
_SPECIAL = _EMBEDDING + ".fusion_embedding"


def _hf_decoder_rules() -> tuple[Rule, ...]:
    rules = (
        replace(
            rule,
            native=_DECODER + rule.native,
            foreign=_HF_TEXT + rule.foreign,
            layers="hf_layers" if LAYER in rule.native else "",
        )
        for rule in hf_rules(permuted=True)
        if isinstance(rule, Rule)
    )
    # The rows for special tokens lie behind those of the vocabulary.
    return tuple(
        replace(rule, part=0, along="in") if rule.native == _EMBEDDING else rule for rule in rules
    )


LLAMA3_VISION = Family(
    name="mllama",
    modules=(
        *_DECODER_MODULES,
        table(_SPECIAL, "special_tokens", "hidden"),
        *_FUSION_MODULES,
        *ENCODER_MODULES,
    ),
    formats={
        "hf": (
            *_hf_decoder_rules(),
            Rule(_SPECIAL, _HF_TEXT + "model.embed_tokens", part=1, along="in"),
            *_HF_FUSION_RULES,
            *HF_ENCODER_RULES,
        )
    },
    hf_defaults={
        "text_config": {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
        },
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_global_layers": 8,
            "vision_output_dim": 7680,
            "num_channels": 3,
            "image_size": 448,
            "patch_size": 14,
            "max_num_tiles": 4,
            "supported_aspect_ratios": [
                [1, 1],
                [1, 2],
                [1, 3],
                [1, 4],
                [2, 1],
                [2, 2],
                [3, 1],
                [4, 1],
            ],
        },
    },
    in_peft=False,
)
