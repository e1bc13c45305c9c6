"""``config.json`` of the families that have no native decoder.

Their tensors are mapped all the same. Fields and what stands for missing ones are those of the
classes ``Llama4TextConfig``, ``MllamaConfig``, ``CLIPTextConfig`` and ``T5Config`` of transformers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from checkpointing.errors import ConfigError
from checkpointing.families.clip_text import ClipTextDims
from checkpointing.families.llama3_vision import VisionDims
from checkpointing.families.t5_encoder import EMBEDDING_COPY, T5Dims
from checkpointing.formats.hf_layers import no_rope_layers
from checkpointing.formats.hf_rope import read_rope
from checkpointing.formats.recognise import check_counts, number_field, size_field
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.mapping.tensors import TensorSource
from checkpointing.mapping.ties import is_tied, same_tensors

# Rows that the embedding has for special tokens in every model of Meta and of transformers.
_SPECIAL_TOKENS = 8


class Reader(Protocol):
    """Reads a family's ``config.json``; arguments and errors are ``parse_hf_config``'s."""

    def __call__(
        self,
        path: Path,
        config: Mapping[str, Any],
        family: Family,
        format: str,
        source: TensorSource,
    ) -> ModelConfig: ...


def _llama4(
    path: Path, config: Mapping[str, Any], family: Family, format: str, source: TensorSource
) -> ModelConfig:
    values = {**family.hf_defaults, **config}
    layers = size_field(path, values, "num_hidden_layers")
    experts = size_field(path, values, "num_local_experts")
    check_counts(path, layers, experts, len(source.metas))
    heads = size_field(path, values, "num_attention_heads")
    hidden = size_field(path, values, "hidden_size")
    expert_ffn = size_field(path, values, "intermediate_size")
    head_dim = size_field(path, values, "head_dim", hidden // heads)
    step = size_field(path, values, "interleave_moe_layer_step")
    mixtures = values.get("moe_layers")
    if mixtures is None:
        mixtures = range(step - 1, layers, step)
    rope = read_rope(path, values, family, head_dim)
    return ModelConfig(
        family=family.name,
        dims=Dims(
            layers=layers,
            vocab=size_field(path, values, "vocab_size"),
            hidden=hidden,
            ffn=size_field(path, values, "intermediate_size_mlp"),
            heads=heads,
            kv_heads=size_field(path, values, "num_key_value_heads", heads),
            head_dim=head_dim,
            tied=is_tied(
                family, format, source, config.get("tie_word_embeddings"), str(path.parent)
            ),
            attention_bias=bool(values["attention_bias"]),
            experts=experts,
            expert_ffn=expert_ffn,
            shared_ffn=expert_ffn,
            expert_layers=_layer_numbers(path, "moe_layers", mixtures, layers),
        ),
        norm_eps=number_field(path, values, "rms_norm_eps"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_seq_len=size_field(path, values, "max_position_embeddings"),
        no_rope_layers=no_rope_layers(path, values, layers),
        activation=values["hidden_act"],
        experts_per_token=size_field(path, values, "num_experts_per_tok"),
        unsupported=("the layers of Llama 4",),
    )


def _mllama(
    path: Path, config: Mapping[str, Any], family: Family, format: str, source: TensorSource
) -> ModelConfig:
    text, vision = (
        {**family.hf_defaults[part], **(config.get(part) or {})}
        for part in ("text_config", "vision_config")
    )
    layers = size_field(path, text, "num_hidden_layers")
    crossing = _layer_numbers(
        path, "cross_attention_layers", text["cross_attention_layers"], layers
    )
    # Natively a layer with cross-attention is part of the layer behind it.
    if any(layer + 1 in crossing or layer + 1 == layers for layer in crossing):
        raise ConfigError(
            f"{path}: cross_attention_layers {list(crossing)}: each must be followed by a layer "
            "with self-attention, or the model has no native layout"
        )
    heads = size_field(path, text, "num_attention_heads")
    hidden = size_field(path, text, "hidden_size")
    rope = read_rope(path, text, family, hidden // heads)
    patch = size_field(path, vision, "patch_size")
    tiles = size_field(path, vision, "max_num_tiles")
    return ModelConfig(
        family=family.name,
        dims=VisionDims(
            layers=layers - len(crossing),
            vocab=size_field(path, text, "vocab_size"),
            hidden=hidden,
            ffn=size_field(path, text, "intermediate_size"),
            heads=heads,
            kv_heads=size_field(path, text, "num_key_value_heads", heads),
            head_dim=hidden // heads,
            cross_attention_layers=crossing,
            special_tokens=_SPECIAL_TOKENS,
            vision_layers=size_field(path, vision, "num_hidden_layers"),
            global_layers=size_field(path, vision, "num_global_layers"),
            vision_hidden=size_field(path, vision, "hidden_size"),
            vision_ffn=size_field(path, vision, "intermediate_size"),
            vision_features=size_field(path, vision, "vision_output_dim"),
            channels=size_field(path, vision, "num_channels"),
            patch=patch,
            tokens=(size_field(path, vision, "image_size") // patch) ** 2 + 1,
            tiles=tiles,
            aspect_ratios=_aspect_ratios(path, vision["supported_aspect_ratios"], tiles),
        ),
        norm_eps=number_field(path, text, "rms_norm_eps"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_seq_len=size_field(path, text, "max_position_embeddings"),
        activation=text["hidden_act"],
        unsupported=("images and cross-attention to them",),
    )


def _clip_text(
    path: Path, config: Mapping[str, Any], family: Family, format: str, source: TensorSource
) -> ModelConfig:
    values = {**family.hf_defaults, **config}
    if "text_projection.weight" in source.metas:
        raise ConfigError(
            f"{path}: the model has a text_projection.weight, which CLIP's native text encoder "
            f"does not: load it with transformers' {family.hf_class}, and save that"
        )
    heads = size_field(path, values, "num_attention_heads")
    hidden = size_field(path, values, "hidden_size")
    positions = size_field(path, values, "max_position_embeddings")
    return ModelConfig(
        family=family.name,
        dims=ClipTextDims(
            layers=size_field(path, values, "num_hidden_layers"),
            vocab=size_field(path, values, "vocab_size"),
            hidden=hidden,
            ffn=size_field(path, values, "intermediate_size"),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            positions=positions,
        ),
        norm_eps=number_field(path, values, "layer_norm_eps"),
        rope_theta=None,
        rope_scaling=None,
        max_seq_len=positions,
        activation=values["hidden_act"],
        unsupported=("the text encoder of CLIP",),
    )


def _t5_encoder(
    path: Path, config: Mapping[str, Any], family: Family, format: str, source: TensorSource
) -> ModelConfig:
    values = {**family.hf_defaults, **config}
    metas = source.metas
    decoder = [name for name in metas if name.startswith(("decoder.", "lm_head."))]
    if decoder:
        raise ConfigError(
            f"{path}: the model has a decoder ({decoder[0]} and {len(decoder) - 1} more), and only "
            f"encoders of T5 have a native layout: load it with transformers' {family.hf_class}, "
            "and save that"
        )
    if not str(values["feed_forward_proj"]).startswith("gated-"):
        raise ConfigError(
            f"{path}: feed_forward_proj is {values['feed_forward_proj']!r}; only T5 1.1, whose "
            "feed-forward layers are gated, has a native layout: take a release of that"
        )
    shared = "shared.weight"
    if {EMBEDDING_COPY, shared} <= set(metas) and not same_tensors(source, EMBEDDING_COPY, shared):
        raise ConfigError(
            f"{path.parent}: {EMBEDDING_COPY} differs from {shared}, whose copy transformers "
            "takes it for: take out the wrong one"
        )
    heads = size_field(path, values, "num_heads")
    return ModelConfig(
        family=family.name,
        dims=T5Dims(
            layers=size_field(path, values, "num_layers"),
            vocab=size_field(path, values, "vocab_size"),
            hidden=size_field(path, values, "d_model"),
            ffn=size_field(path, values, "d_ff"),
            heads=heads,
            kv_heads=heads,
            head_dim=size_field(path, values, "d_kv"),
            buckets=size_field(path, values, "relative_attention_num_buckets"),
        ),
        norm_eps=number_field(path, values, "layer_norm_epsilon"),
        rope_theta=None,
        rope_scaling=None,
        max_seq_len=size_field(path, values, "n_positions"),
        activation=values["feed_forward_proj"],
        unsupported=("the encoder of T5",),
    )


def _layer_numbers(path: Path, key: str, numbers: Sequence[int], layers: int) -> tuple[int, ...]:
    if not set(numbers) <= set(range(layers)) or len(set(numbers)) != len(numbers):
        raise ConfigError(f"{path}: {key} must name layers, each once, of the {layers} there are")
    return tuple(sorted(numbers))


def _aspect_ratios(
    path: Path, shapes: Sequence[Sequence[int]], tiles: int
) -> tuple[tuple[int, int], ...]:
    fits = all(
        len(shape) == 2 and min(shape) > 0 and shape[0] * shape[1] <= tiles for shape in shapes
    )
    if not fits:
        raise ConfigError(
            f"{path}: supported_aspect_ratios must be pairs of rows and columns, of no more tiles "
            f"than max_num_tiles, {tiles}"
        )
    return tuple((rows, columns) for rows, columns in shapes)


READERS: Mapping[str, Reader] = {
    "llama4_text": _llama4,
    "mllama": _mllama,
    "clip_text_model": _clip_text,
    "t5": _t5_encoder,
}
"""By family; the configs of all others are alike."""
