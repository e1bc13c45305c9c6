"""What ``config.json`` says of rotary positions.

transformers 5 writes ``rope_parameters``, earlier releases ``rope_theta`` and ``rope_scaling``. The
names of the fields and what stands for a missing one are those of ``modeling_rope_utils`` in
transformers 5.24.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.formats.recognise import number_field, size_field
from checkpointing.mapping.family import Family
from checkpointing.mapping.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

_ORIGINAL = "original_max_position_embeddings"
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeFields:
    """The fields of ``ModelConfig`` that have to do with rotary positions.

    Attributes:
        theta: ``rope_theta``.
        scaling: ``rope_scaling``.
        rotary_dim: as there.
        sliding_theta: ``sliding_rope_theta``.
        sliding_scaling: ``sliding_rope_scaling``.
        unsupported: kinds of scaling that are not known.
    """

    theta: float
    scaling: RopeScaling | None
    rotary_dim: int | None
    sliding_theta: float | None = None
    sliding_scaling: RopeScaling | None = None
    unsupported: tuple[str, ...] = ()


def read_rope(path: Path, values: Mapping[str, Any], family: Family, head_dim: int) -> RopeFields:
    """The rotary positions of a model.

    Args:
        path: the config file, for errors.
        values: its content over the family's defaults.
        family: layers that slide their window have positions of their own where its defaults hold
            ``rope_local_base_freq``, and a head is rotated in part where they hold
            ``partial_rotary_factor``.
        head_dim: width of a head.

    Raises:
        ConfigError: if a field of the scaling is missing, or not of its type.
    """
    if "rope_local_base_freq" in family.hf_defaults:
        return _read_per_layer_type(path, values, family, head_dim)
    # Where there are both, transformers takes the older field.
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = _object(path, values, key)
    rotary_dim = None
    if "partial_rotary_factor" in family.hf_defaults:
        whole = values["partial_rotary_factor"]
        part = number_field(path, rope, "partial_rotary_factor", whole)
        rotary_dim = None if part == 1 else int(head_dim * part)
    theta = number_field(path, rope, "rope_theta", values["rope_theta"])
    scaling, unsupported = _scaling(path, rope, values, family, rotary_dim or head_dim)
    if any(name in rope for name in _LAYER_TYPES):
        unsupported += (f"{key} for each type of layer",)
    return RopeFields(theta, scaling, rotary_dim, unsupported=unsupported)


def _read_per_layer_type(
    path: Path, values: Mapping[str, Any], family: Family, head_dim: int
) -> RopeFields:
    by_type = _object(path, values, "rope_parameters")
    # transformers 4's scaling is that of the layers with full attention.
    full = {**_object(path, by_type, "full_attention"), **_object(path, values, "rope_scaling")}
    sliding = _object(path, by_type, "sliding_attention")
    theta = number_field(path, full, "rope_theta", values["rope_theta"])
    local = number_field(path, sliding, "rope_theta", values["rope_local_base_freq"])
    scaling, unsupported = _scaling(path, full, values, family, head_dim)
    local_scaling, local_unsupported = _scaling(path, sliding, values, family, head_dim)
    return RopeFields(
        theta, scaling, None, local, local_scaling, (*unsupported, *local_unsupported)
    )


def _object(path: Path, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{path}: {key} is {value!r}, but must be an object")
    return value or {}


def _scaling(
    path: Path, rope: Mapping[str, Any], values: Mapping[str, Any], family: Family, rotary_dim: int
) -> tuple[RopeScaling | None, tuple[str, ...]]:
    """The scaling, and the name of an unknown one."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str):
        raise ConfigError(f"{path}: rope_type is {kind!r}, but must be a name")
    kind = family.hf_aliases.get("rope_type", {}).get(kind, kind)
    context = size_field(path, values, "max_position_embeddings")
    original = size_field(path, rope, _ORIGINAL, context)
    # Phi-3 has it beside the scaling, and transformers prefers that for every family.
    original = size_field(path, values, _ORIGINAL, original)
    match kind:
        case "default":
            return None, ()
        case LinearRopeScaling.kind:
            return LinearRopeScaling(number_field(path, rope, "factor")), ()
        case DynamicRopeScaling.kind:
            return DynamicRopeScaling(number_field(path, rope, "factor")), ()
        case Llama3RopeScaling.kind:
            low, high = (number_field(path, rope, f"{end}_freq_factor") for end in ("low", "high"))
            return Llama3RopeScaling(number_field(path, rope, "factor"), low, high, original), ()
        case YarnRopeScaling.kind:
            return _yarn(path, rope, original, context), ()
        case LongRopeScaling.kind:
            return _longrope(path, rope, original, context, pairs=-(-rotary_dim // 2)), ()
    return None, (f"rope_type {kind!r}",)


def _yarn(path: Path, rope: Mapping[str, Any], original: int, context: int) -> YarnRopeScaling:
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"{path}: truncate is {truncate!r}, but must be true or false")
    # In transformers a 0 counts as a missing field, except for this one.
    given = {key: value for key, value in rope.items() if value != 0 or key == "attention_factor"}
    return YarnRopeScaling(
        factor=number_field(path, rope, "factor", context / original),
        original_max_seq_len=original,
        beta_fast=number_field(path, given, "beta_fast", YarnRopeScaling.beta_fast),
        beta_slow=number_field(path, given, "beta_slow", YarnRopeScaling.beta_slow),
        truncate=truncate,
        attention_factor=_optional(path, given, "attention_factor"),
        mscale=_optional(path, given, "mscale"),
        mscale_all_dim=_optional(path, given, "mscale_all_dim"),
    )


def _longrope(
    path: Path, rope: Mapping[str, Any], original: int, context: int, pairs: int
) -> LongRopeScaling:
    return LongRopeScaling(
        factor=number_field(path, rope, "factor", context / original),
        original_max_seq_len=original,
        short_factor=_numbers(path, rope, "short_factor", pairs),
        long_factor=_numbers(path, rope, "long_factor", pairs),
        attention_factor=_optional(path, rope, "attention_factor"),
    )


def _optional(path: Path, rope: Mapping[str, Any], key: str) -> float | None:
    return None if rope.get(key) is None else number_field(path, rope, key)


def _numbers(path: Path, rope: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    numbers = rope.get(key)
    if not isinstance(numbers, list) or len(numbers) != count:
        raise ConfigError(
            f"{path}: {key} must be a list of {count} numbers, one for each rotated pair of a head"
        )
    return tuple(number_field(path, {key: number}, key) for number in numbers)


def rope_scaling_field(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """``rope_scaling`` of a ``config.json``, as :func:`read_rope` reads it."""
    if scaling is None:
        return None
    fields = {
        key.replace("original_max_seq_len", _ORIGINAL): value
        for key, value in dataclasses.asdict(scaling).items()
        if value is not None
    }
    return {"rope_type": scaling.kind, **fields}
