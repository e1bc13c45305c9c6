"""The image encoder of Llama 3.2 Vision and its projection into the decoder's width."""

from dataclasses import replace

from checkpointing.families.decoder import LAYER
from checkpointing.mapping.axis_ops import TilesByAspectRatio
from checkpointing.mapping.rules import Module, Parameter, Rule, biased_linear, layer_norm, linear

_TILES = TilesByAspectRatio("tiles", "aspect_ratios", "vision_hidden")
_TILE_TABLE = Parameter(
    "", "weight", ("tiles", "tiles", "one", "out"), ("lists", "tile_list"), _TILES
)
_TOKEN_TABLE = Parameter(
    "", "weight", ("tiles", "tiles", "tokens", "out"), ("lists", "token_list"), _TILES
)
_ITSELF = Parameter("", "", ("out",))
GATE = Parameter("scale", "", ("out",))


_CLIP = "encoder.clip."
_PROJECTION = "encoder.projection."
_HF_VISION = "vision_model."


def _vision_layer(layer: str, layers: str) -> tuple[Module, ...]:
    """The modules of a layer of the encoder or the projection."""
    modules = (
        layer_norm(layer + "sa_norm", "vision_hidden"),
        linear(layer + "attn.q_proj", "vision_hidden", "vision_hidden"),
        linear(layer + "attn.k_proj", "vision_hidden", "vision_hidden"),
        linear(layer + "attn.v_proj", "vision_hidden", "vision_hidden"),
        linear(layer + "attn.output_proj", "vision_hidden", "vision_hidden"),
        layer_norm(layer + "mlp_norm", "vision_hidden"),
        biased_linear(layer + "mlp.w1", "vision_ffn", "vision_hidden"),
        biased_linear(layer + "mlp.w2", "vision_hidden", "vision_ffn"),
    )
    return tuple(replace(module, layers=layers) for module in modules)


def _hf_vision_layer(native: str, hf: str) -> tuple[Rule, ...]:
    return (
        Rule(native + "sa_norm", hf + "input_layernorm"),
        Rule(native + "attn.q_proj", hf + "self_attn.q_proj"),
        Rule(native + "attn.k_proj", hf + "self_attn.k_proj"),
        Rule(native + "attn.v_proj", hf + "self_attn.v_proj"),
        Rule(native + "attn.output_proj", hf + "self_attn.o_proj"),
        Rule(native + "mlp_norm", hf + "post_attention_layernorm"),
        Rule(native + "mlp.w1", hf + "mlp.fc1"),
        Rule(native + "mlp.w2", hf + "mlp.fc2"),
    )


ENCODER_MODULES = (
    Module(
        _CLIP + "conv",
        "vision_hidden",
        "channels",
        (Parameter("weight", "weight", ("out", "in", "patch", "patch")),),
    ),
    Module(
        _CLIP + "cls_token_embedding", "vision_hidden", "", (Parameter("weight", "", ("out",)),)
    ),
    Module(_CLIP + "pre_tile_pos_embed.embedding", "vision_hidden", "", (_TILE_TABLE,)),
    Module(_CLIP + "pre_tile_pos_embed.gate", "one", "", (_ITSELF,)),
    Module(
        _CLIP + "token_pos_embedding.local_token_positional_embedding",
        "vision_hidden",
        "",
        (Parameter("", "", ("tokens", "out")),),
    ),
    Module(
        _CLIP + "token_pos_embedding.global_token_positional_embedding",
        "vision_hidden",
        "",
        (_TOKEN_TABLE,),
    ),
    Module(_CLIP + "token_pos_embedding.gate", "one", "", (_ITSELF,)),
    layer_norm(_CLIP + "ln_pre", "vision_hidden"),
    *_vision_layer(_CLIP + LAYER, "all_vision_layers"),
    layer_norm(_CLIP + "ln_post", "vision_hidden"),
    Module(_CLIP + "post_tile_pos_embed.embedding", "vision_hidden", "", (_TILE_TABLE,)),
    Module(_CLIP + "post_tile_pos_embed.gate", "one", "", (_ITSELF,)),
    *_vision_layer(_PROJECTION + LAYER, "all_global_layers"),
    *(
        Module(_PROJECTION + LAYER + gate, "one", "", (GATE,), layers="all_global_layers")
        for gate in ("sa_scale", "mlp_scale")
    ),
    biased_linear(_PROJECTION + "output", "hidden", "vision_features"),
)

HF_ENCODER_RULES = (
    Rule(_CLIP + "conv", _HF_VISION + "patch_embedding"),
    Rule(_CLIP + "cls_token_embedding", _HF_VISION + "class_embedding"),
    *(
        Rule(f"{_CLIP}{place}_tile_pos_embed.{part}", f"{_HF_VISION}{place}_tile_{hf}")
        for place in ("pre", "post")
        for part, hf in (
            ("embedding", "positional_embedding.embedding"),
            ("gate", "positional_embedding.gate"),
        )
    ),
    Rule(
        _CLIP + "token_pos_embedding.local_token_positional_embedding",
        _HF_VISION + "gated_positional_embedding.embedding",
    ),
    Rule(
        _CLIP + "token_pos_embedding.global_token_positional_embedding",
        _HF_VISION + "gated_positional_embedding.tile_embedding",
    ),
    Rule(_CLIP + "token_pos_embedding.gate", _HF_VISION + "gated_positional_embedding.gate"),
    Rule(_CLIP + "ln_pre", _HF_VISION + "layernorm_pre"),
    *_hf_vision_layer(_CLIP + LAYER, _HF_VISION + "transformer." + LAYER),
    Rule(_CLIP + "ln_post", _HF_VISION + "layernorm_post"),
    *_hf_vision_layer(_PROJECTION + LAYER, _HF_VISION + "global_transformer." + LAYER),
    Rule(
        _PROJECTION + LAYER + "sa_scale", _HF_VISION + "global_transformer." + LAYER + "gate_attn"
    ),
    Rule(
        _PROJECTION + LAYER + "mlp_scale", _HF_VISION + "global_transformer." + LAYER + "gate_ffn"
    ),
    Rule(_PROJECTION + "output", "multi_modal_projector"),
)
