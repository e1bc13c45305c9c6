"""What ``config.json`` says of mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.formats.recognise import size_field


@dataclass(frozen=True)
class Experts:
    """Which layers are mixtures of experts, and how a token finds its experts.

    Attributes:
        layers: their numbers.
        per_token: number of experts that a token goes to.
        normalized: the weights of a token's experts sum to 1.
        unsupported: features that the native decoder does not compute.
    """

    layers: tuple[int, ...] = ()
    per_token: int = 0
    normalized: bool = False
    unsupported: tuple[str, ...] = ()


def read_experts(path: Path, values: Mapping[str, Any], layers: int) -> Experts:
    """Reads the fields that families with experts have.

    Args:
        path: the config file, for errors.
        values: its content over the family's defaults.
        layers: number of layers.

    Raises:
        ConfigError: if a field is wrong.
    """
    if "num_experts_per_tok" not in values:
        return Experts()
    dense = values.get("mlp_only_layers") or []
    step = size_field(path, values, "decoder_sparse_step", 1)
    return Experts(
        layers=tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0),
        per_token=size_field(path, values, "num_experts_per_tok"),
        normalized=bool(values["norm_topk_prob"]),
        unsupported=("router_jitter_noise",) if values.get("router_jitter_noise") else (),
    )
