"""Config files made anew, for a model that changes to a format whose config file it lacks."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from checkpointing.errors import ConfigError
from checkpointing.families import FAMILIES
from checkpointing.formats.hf_rope import rope_scaling_field
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.mapping.rope_scaling import Llama3RopeScaling

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_META_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_LARGEST_MULTIPLE = 4096


def hf_config_for(
    config: ModelConfig, dtype: torch.dtype, token_ids: Mapping[str, Any], where: Path
) -> dict[str, Any]:
    """``config.json`` for a model of which ``params.json`` is known.

    RoPE is written as ``rope_theta`` and ``rope_scaling``, which transformers 4 and 5 both read.

    Args:
        config: the model.
        dtype: of the weights.
        token_ids: ``bos_token_id`` and ``eos_token_id`` where they are known. They are null
            otherwise, since transformers takes those of Llama 2 for what is not there.
        where: the model's directory, for errors.

    Raises:
        ConfigError: if the family's config.json cannot be made from what is known.
    """
    if config.family not in _ARCHITECTURES:
        raise ConfigError(
            f"{where}: has no config.json, and one can be made only for "
            f"{' and '.join(_ARCHITECTURES)}, not for {config.family}; copy the model's own into it"
        )
    dims = config.dims
    made: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling_field(config.rope_scaling),
        "tie_word_embeddings": dims.tied,
        "bos_token_id": token_ids.get("bos_token_id"),
        "eos_token_id": token_ids.get("eos_token_id"),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    optional = {
        "sliding_window": config.sliding_window,
        "attention_bias": dims.attention_bias,
        "mlp_bias": dims.mlp_bias,
    }
    known = FAMILIES[config.family].hf_defaults
    return made | {key: value for key, value in optional.items() if key in known}


def params_for(config: ModelConfig, where: Path) -> dict[str, Any]:
    """``params.json`` for a model of which ``config.json`` is known.

    Keys and formulas: https://github.com/meta-llama/llama-models, ``ModelArgs``. ``head_dim``,
    which Meta's code does not know, is written only where it is not ``dim / n_heads``.

    Args:
        config: the model.
        where: the model's directory, for errors.

    Raises:
        ConfigError: names every feature of the model that Meta's format cannot hold.
    """
    features = _not_in_meta(config)
    if features:
        raise ConfigError(
            f"{where}: Meta's format cannot hold this {config.family} model's "
            f"{', '.join(features)}; convert it to hf or tune"
        )
    dims = config.dims
    params: dict[str, Any] = {
        "dim": dims.hidden,
        "n_layers": dims.layers,
        "n_heads": dims.heads,
        "n_kv_heads": dims.kv_heads,
        "vocab_size": dims.vocab,
        **_ffn_fields(dims),
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "use_scaled_rope": config.rope_scaling is not None,
    }
    if dims.head_dim * dims.heads != dims.hidden:
        params["head_dim"] = dims.head_dim
    if config.rope_scaling is not None:
        params["rope_scaling_factor"] = config.rope_scaling.factor
    return params


def _not_in_meta(config: ModelConfig) -> list[str]:
    """What differs from a plain Llama."""
    if "meta" not in FAMILIES[config.family].formats:
        return ["architecture"]
    # Every field that has a default is a feature which a plain model lacks.
    features = [
        f"{field.name} ({getattr(part, field.name)})"
        for part in (config, config.dims)
        for field in dataclasses.fields(part)
        if field.default is not dataclasses.MISSING
        and field.name != "tied"
        and getattr(part, field.name) != field.default
    ]
    scaling = config.rope_scaling
    if isinstance(scaling, Llama3RopeScaling):
        features += [
            f"rope scaling {name} ({getattr(scaling, name)}, Meta's is {value})"
            for name, value in _META_SCALING.items()
            if getattr(scaling, name) != value
        ]
    elif scaling is not None:
        features.append(f"rope scaling {scaling.kind}")
    return features


def meta_ffn(hidden: int, multiple_of: int, multiplier: float | None) -> int:
    """Feed-forward width as Meta's code computes it from ``params.json``."""
    width = int(2 * (4 * hidden) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * ((width + multiple_of - 1) // multiple_of)


def _ffn_fields(dims: Dims) -> dict[str, Any]:
    """``multiple_of`` and ``ffn_dim_multiplier`` for which Meta's formula gives the width."""
    multiple = 1
    while multiple < _LARGEST_MULTIPLE and dims.ffn % (2 * multiple) == 0:
        multiple *= 2
    usual = [size for size in (256, multiple) if meta_ffn(dims.hidden, size, None) == dims.ffn]
    if usual:
        return {"multiple_of": usual[0]}
    # Half an element above the width, so that rounding down gives it, and rounding up keeps it.
    exact = (dims.ffn + 0.5) / int(2 * (4 * dims.hidden) / 3)
    shortest = next(
        (
            rounded
            for digits in range(1, 9)
            if meta_ffn(dims.hidden, multiple, rounded := round(exact, digits)) == dims.ffn
        ),
        exact,
    )
    return {"multiple_of": multiple, "ffn_dim_multiplier": shortest}
