"""What ``config.json`` says of single layers: which slide their window, which have no positions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.formats.recognise import size_field
from checkpointing.mapping.family import Family

_FULL, _SLIDING = "full_attention", "sliding_attention"


def attention_layers(
    path: Path, values: Mapping[str, Any], family: Family, layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window, and the layers that attend to all in spite of it.

    Args:
        path: the config file, for errors.
        values: its content over the family's defaults.
        family: a window counts only in families whose defaults have one.
        layers: number of layers.

    Raises:
        ConfigError: if a layer's type is unknown, or there is not one for each layer.
    """
    unused = values.get("use_sliding_window") is False
    if "sliding_window" not in family.hf_defaults or values["sliding_window"] is None or unused:
        return None, ()
    window = size_field(path, values, "sliding_window")
    types = _layer_types(path, values, layers)
    if len(types) != layers or set(types) - {_FULL, _SLIDING}:
        raise ConfigError(
            f"{path}: layer_types must name {_FULL} or {_SLIDING} for each of the {layers} layers"
        )
    full = tuple(layer for layer, kind in enumerate(types) if kind == _FULL)
    return (None, ()) if len(full) == layers else (window, full)


def _layer_types(path: Path, values: Mapping[str, Any], layers: int) -> Sequence[str]:
    if values.get("layer_types") is not None:
        return list(values["layer_types"])
    if values.get("layer_types_cycle"):
        cycle = values["layer_types_cycle"]
        return [cycle[layer % len(cycle)] for layer in range(layers)]
    if "sliding_window_pattern" in values:
        pattern = size_field(path, values, "sliding_window_pattern")
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(layers)]
    if "no_rope_layer_interval" in values:
        # SmolLM3 slides its window in just the layers without positions.
        sliding = no_rope_layers(path, values, layers)
        return [_SLIDING if layer in sliding else _FULL for layer in range(layers)]
    if values.get("max_window_layers") is not None:
        first = values["max_window_layers"]
        return [_FULL if layer < first else _SLIDING for layer in range(layers)]
    return [_SLIDING] * layers


def no_rope_layers(path: Path, values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers without positions.

    Raises:
        ConfigError: if ``no_rope_layers`` does not have one entry for each layer.
    """
    # Despite its name, the list has a 1 for each layer that does have positions.
    has_rope = values.get("no_rope_layers")
    if has_rope is None:
        if "no_rope_layer_interval" not in values:
            return ()
        interval = size_field(path, values, "no_rope_layer_interval")
        has_rope = [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(has_rope, list) or len(has_rope) != layers:
        raise ConfigError(f"{path}: no_rope_layers must have one entry for each of {layers} layers")
    return tuple(layer for layer, has in enumerate(has_rope) if not has)
