"""Hugging Face's ``config.json``."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.formats.hf_layers import attention_layers, no_rope_layers
from checkpointing.formats.recognise import number_field, recognise, size_field
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims, Llama3RopeScaling, ModelConfig
from checkpointing.mapping.sizes import size_from_tensors
from checkpointing.mapping.tensors import TensorSource
from checkpointing.mapping.ties import is_tied
from checkpointing.storage.read import read_json

CONFIG_NAME = "config.json"

# Native name of an activation by Hugging Face's.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}

_FIELDS = {
    "layers": "num_hidden_layers",
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
}


def read_hf_config(directory: Path, model_type: str | None) -> tuple[dict[str, Any], Family]:
    """``config.json`` as it is, and the family that it and the recipe's model type name.

    Raises:
        CheckpointNotFoundError: if there is no ``config.json``.
        ConfigError: if the family is unknown or contradicted.
    """
    path = directory / CONFIG_NAME
    config = read_json(path)
    return config, recognise(path, config.get("model_type"), model_type)


def parse_hf_config(
    path: Path, config: Mapping[str, Any], family: Family, format: str, source: TensorSource
) -> ModelConfig:
    """What ``config.json`` says; a missing field takes transformers' default for the family.

    Sizes that are missing are read from the tensors.

    Args:
        path: the config file, for errors.
        config: its content.
        family: the family's defaults.
        format: the format of the tensors, ``"hf"`` or ``"native"``.
        source: the tensors.

    Raises:
        ConfigError: if a size is missing, or no positive whole number.
    """
    values = {**family.hf_defaults, **config}
    for key, aliases in family.hf_aliases.items():
        values[key] = aliases.get(values[key], values[key])
    tensors = source.metas
    sizes = {
        field: size_field(path, values, key, size_from_tensors(family, format, field, tensors))
        for field, key in _FIELDS.items()
    }
    heads = size_field(path, values, "num_attention_heads")
    kv_heads = size_field(path, values, "num_key_value_heads", heads)
    head_dim = size_field(path, values, "head_dim", sizes["hidden"] // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{path}: {heads} heads must be a multiple of {kv_heads} key-value heads, and the "
            f"width of a head, {head_dim}, even"
        )
    tied = is_tied(family, format, source, config.get("tie_word_embeddings"), str(path.parent))
    rope_theta, scaling, unsupported = _rope(path, values)
    activation = values.get("hidden_activation") or values["hidden_act"]
    if activation not in _ACTIVATIONS:
        unsupported += (f"hidden_act {activation!r}",)
    if values.get("use_bidirectional_attention"):
        unsupported += ("use_bidirectional_attention",)
    window, full_attention_layers = attention_layers(path, values, family, sizes["layers"])
    scale = None
    if "query_pre_attn_scalar" in values:
        scale = number_field(path, values, "query_pre_attn_scalar", math.nan) ** -0.5
    return ModelConfig(
        family=family.name,
        dims=Dims(
            **sizes,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            tied=tied,
            attention_bias=bool(values["attention_bias"]),
            mlp_bias=bool(values["mlp_bias"]),
        ),
        norm_eps=number_field(path, values, "rms_norm_eps", family.hf_defaults["rms_norm_eps"]),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        max_seq_len=size_field(path, values, "max_position_embeddings"),
        sliding_window=window,
        full_attention_layers=full_attention_layers,
        no_rope_layers=no_rope_layers(path, values, sizes["layers"]),
        rotary_dim=_rotary_dim(path, values, head_dim),
        activation=_ACTIVATIONS.get(activation, activation),
        attention_scale=scale,
        attention_softcap=_optional(path, values, "attn_logit_softcapping"),
        output_softcap=_optional(path, values, "final_logit_softcapping"),
        unsupported=unsupported,
    )


def _optional(path: Path, values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else number_field(path, values, key, math.nan)


def _rotary_dim(path: Path, values: Mapping[str, Any], head_dim: int) -> int | None:
    if "partial_rotary_factor" not in values:
        return None
    rope = values.get("rope_parameters") or {}
    factor = number_field(path, rope, "partial_rotary_factor", values["partial_rotary_factor"])
    return None if factor == 1 else int(head_dim * factor)


def _rope(
    path: Path, values: Mapping[str, Any]
) -> tuple[float, Llama3RopeScaling | None, tuple[str, ...]]:
    # transformers 5 writes rope_parameters; earlier releases rope_theta and rope_scaling.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{path}: rope_parameters or rope_scaling is {rope!r}, but no object")
    theta = number_field(path, rope, "rope_theta", values["rope_theta"])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None, ()
    if kind != "llama3":
        return theta, None, (f"rope_type {kind!r}",)
    scaling = Llama3RopeScaling(
        factor=number_field(path, rope, "factor", math.nan),
        low_freq_factor=number_field(path, rope, "low_freq_factor", math.nan),
        high_freq_factor=number_field(path, rope, "high_freq_factor", math.nan),
        original_max_seq_len=size_field(path, rope, "original_max_position_embeddings"),
    )
    return theta, scaling, ()
