"""Hugging Face's ``config.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.families.classifier import SUFFIX as CLASSIFIER
from checkpointing.formats.config_types import check_types, read_config
from checkpointing.formats.hf_encoders import READERS
from checkpointing.formats.hf_experts import read_experts
from checkpointing.formats.hf_layers import attention_layers, no_rope_layers
from checkpointing.formats.hf_rope import read_rope
from checkpointing.formats.recognise import check_counts, number_field, recognise, size_field
from checkpointing.mapping.family import Family
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.mapping.sizes import size_from_tensors
from checkpointing.mapping.tensors import TensorSource
from checkpointing.mapping.ties import is_tied

CONFIG_NAME = "config.json"

# Native name of an activation by Hugging Face's.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}

_FIELDS = {
    "layers": ("num_hidden_layers",),
    "vocab": ("vocab_size",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
}


def read_hf_config(directory: Path, model_type: str | None) -> tuple[dict[str, Any], Family]:
    """``config.json`` as it is, and the family that it and the recipe's model type name.

    Raises:
        CheckpointNotFoundError: if there is no ``config.json``.
        ConfigError: if the family is unknown or contradicted.
    """
    path = directory / CONFIG_NAME
    config = read_config(path)
    family = recognise(path, _family_name(config), model_type)
    check_types(path, config, family.hf_defaults)
    return config, family


def _family_name(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures") or []
    is_classifier = any("ForSequenceClassification" in str(name) for name in architectures)
    model_type = config.get("model_type")
    return f"{model_type}{CLASSIFIER}" if model_type and is_classifier else model_type


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
    if family.name in READERS:
        return READERS[family.name](path, config, family, format, source)
    values = {**family.hf_defaults, **config}
    for key, aliases in family.hf_aliases.items():
        if key in values:
            values[key] = aliases.get(values[key], values[key])
    tensors = source.metas
    sizes = {}
    for field, keys in {**_FIELDS, **family.hf_fields}.items():
        key = next((key for key in keys if values.get(key) is not None), keys[0])
        shown = size_from_tensors(family, format, field, tensors)
        sizes[field] = size_field(path, values, key, shown)
    check_counts(path, sizes["layers"], sizes.get("experts", 0), len(tensors))
    heads = size_field(path, values, "num_attention_heads")
    kv_heads = size_field(path, values, "num_key_value_heads", heads)
    head_dim = size_field(path, values, "head_dim", sizes["hidden"] // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{path}: {heads} heads must be a multiple of {kv_heads} key-value heads, and the "
            f"width of a head, {head_dim}, even"
        )
    tied = is_tied(family, format, source, config.get("tie_word_embeddings"), str(path.parent))
    rope = read_rope(path, values, family, head_dim)
    unsupported = rope.unsupported
    activation = values.get("hidden_activation") or values["hidden_act"]
    if activation not in _ACTIVATIONS:
        unsupported += (f"hidden_act {activation!r}",)
    if values.get("use_bidirectional_attention"):
        unsupported += ("use_bidirectional_attention",)
    experts = read_experts(path, values, sizes["layers"])
    unsupported += experts.unsupported
    window, full_attention_layers = attention_layers(path, values, family, sizes["layers"])
    scale = None
    if "query_pre_attn_scalar" in values:
        scale = number_field(path, values, "query_pre_attn_scalar") ** -0.5
    return ModelConfig(
        family=family.name,
        dims=Dims(
            layers=sizes["layers"],
            vocab=sizes["vocab"],
            hidden=sizes["hidden"],
            ffn=sizes["ffn"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            tied=tied,
            attention_bias=bool(values["attention_bias"]),
            mlp_bias=bool(values["mlp_bias"]),
            experts=sizes.get("experts", 0),
            expert_ffn=sizes.get("expert_ffn", 0),
            shared_ffn=sizes.get("shared_ffn", 0),
            labels=sizes.get("labels", 0),
            expert_layers=experts.layers,
        ),
        norm_eps=number_field(path, values, "rms_norm_eps", family.hf_defaults["rms_norm_eps"]),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_seq_len=size_field(path, values, "max_position_embeddings"),
        sliding_window=window,
        full_attention_layers=full_attention_layers,
        # Without a window no layer slides it.
        sliding_rope_theta=None if window is None else rope.sliding_theta,
        sliding_rope_scaling=None if window is None else rope.sliding_scaling,
        no_rope_layers=no_rope_layers(path, values, sizes["layers"]),
        rotary_dim=rope.rotary_dim,
        activation=_ACTIVATIONS.get(activation, activation),
        attention_scale=scale,
        attention_softcap=_softcap(path, values, family, "attn_logit_softcapping"),
        output_softcap=_softcap(path, values, family, "final_logit_softcapping"),
        experts_per_token=experts.per_token,
        normalizes_experts=experts.normalized,
        unsupported=unsupported,
    )


def _softcap(path: Path, values: Mapping[str, Any], family: Family, key: str) -> float | None:
    # transformers computes none in families whose defaults do not have it, whatever the file says.
    if key not in family.hf_defaults or values[key] is None:
        return None
    return number_field(path, values, key)
