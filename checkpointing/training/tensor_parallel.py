"""Tensor parallelism (Shoeybi et al. 2019): the matrices of a layer cut over the ranks of a group.

What passes between modules are plain tensors, the same on all ranks of a group, or each rank's own
attention heads and feed-forward columns. Within a module torch's ``DTensor`` computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from checkpointing.errors import ConfigError
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.rules import (
    BIAS,
    EXPERTS,
    EXPERTS_A,
    EXPERTS_B,
    LORA_A,
    LORA_B,
    LORA_B_BIAS,
    MAGNITUDE,
    SCALE,
    WEIGHT,
)
from checkpointing.storage.local_part import local_tensor, part_held
from checkpointing.training.decoder import Attention, FeedForward, TransformerDecoder
from checkpointing.training.moe import GroupedExperts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

# What each dimension of a module's parameter is, by its name in the module.
_AXES = {
    parameter.native: parameter.axes
    for parameter in (WEIGHT, BIAS, LORA_A, LORA_B, LORA_B_BIAS, MAGNITUDE, SCALE)
}
# Experts are three maps in one module, the first two into the same inner axis as the last is of.
_INNER = "inner"
_AXES |= {
    parameter.native_name(f"experts.{name}").removeprefix("experts."): tuple(
        _INNER if axis == inner else axis for axis in parameter.axes
    )
    for name, inner in {"gate_proj": "out", "up_proj": "out", "down_proj": "in"}.items()
    for parameter in (EXPERTS, EXPERTS_A, EXPERTS_B)
}


@dataclass(frozen=True)
class _Cut:
    """How a module is cut.

    Attributes:
        axis: ``"out"`` or ``"in"`` of its parameters, or the inner axis of experts; ``None``:
            every rank has all of them.
        given: dimension, counted from the last, along which the ranks give it parts of its input;
            ``None``: all give the same.
        gives: the same of its output.
    """

    axis: str | None = None
    given: int | None = None
    gives: int | None = None


_COPIED = _Cut()
_BY_ROWS = _Cut("out", gives=-1)
_BY_COLUMNS = _Cut("in", given=-1)
_BY_ROWS_JOINED = _Cut("out")
_INSIDE = _Cut(_INNER)
_NORM_OF_EACH_HEAD = _Cut(given=-2, gives=-2)
_NORM_OF_ALL_HEADS = _Cut("out", given=-1, gives=-1)


def cut_tensors(model: TransformerDecoder, mesh: "DeviceMesh") -> None:
    """Makes every parameter a ``DTensor`` of a group of ranks, in place; nothing is sent.

    Projections into attention heads and feed-forward layers, those of experts too, are cut along
    their rows, those out of them along their columns, and the head along its rows, if they can be
    shared evenly. All else is whole on every rank.

    Args:
        model: its parameters are the same on all ranks, or have no memory.
        mesh: of one dimension, with the ranks of the group.

    Raises:
        ConfigError: if heads or columns cannot be shared evenly.
    """
    _check(model.config, mesh.size())
    cuts = dict(_cuts(model, mesh.size()))
    for module in list(_modules_with_parameters(model)):
        _cut_module(module, mesh, cuts.get(module, _COPIED))


def _check(config: ModelConfig, ranks: int) -> None:
    dims = config.dims
    counts = {"attention heads": dims.heads, "key-value heads": dims.kv_heads}
    if dims.dense_layers:
        counts["columns within a feed-forward layer"] = dims.ffn
    if dims.expert_layers:
        counts["columns within an expert"] = dims.expert_ffn
    uneven = [f"{count} {what}" for what, count in counts.items() if count % ranks]
    if uneven:
        raise ConfigError(
            f"tensor_parallel_dim={ranks}: cannot share {' and '.join(uneven)} evenly; take a "
            "number that divides them, or 1, with which the ranks share the weights all the same"
        )


def _cuts(model: TransformerDecoder, ranks: int) -> Iterator[tuple[nn.Module, _Cut]]:
    for module in model.modules():
        if isinstance(module, Attention):
            norm = _NORM_OF_ALL_HEADS if module.norms_all_heads else _NORM_OF_EACH_HEAD
            yield from {module.q_proj: _BY_ROWS, module.k_proj: _BY_ROWS}.items()
            yield from {module.v_proj: _BY_ROWS, module.output_proj: _BY_COLUMNS}.items()
            yield from {module.q_norm: norm, module.k_norm: norm}.items()
        elif isinstance(module, FeedForward):
            yield from {module.w1: _BY_ROWS, module.w3: _BY_ROWS, module.w2: _BY_COLUMNS}.items()
        elif isinstance(module, GroupedExperts):
            yield module, _INSIDE
    if model.output is not None and model.config.dims.vocab % ranks == 0:
        yield model.output, _BY_ROWS_JOINED


def _modules_with_parameters(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that compute with parameters, which may be of modules within them."""
    if next(module.parameters(recurse=False), None) is not None or parametrize.is_parametrized(
        module
    ):
        yield module
    else:
        for child in module.children():
            yield from _modules_with_parameters(child)


def _cut_module(module: nn.Module, mesh: "DeviceMesh", cut: _Cut) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        placement = _placement(_dim_of(name, cut.axis))
        # All ranks have the same, so that nothing need be sent.
        part = distribute_tensor(parameter.detach(), mesh, placement, src_data_rank=None)
        setattr(
            module.get_submodule(owner),
            last,
            nn.Parameter(part, requires_grad=parameter.requires_grad),
        )
    for name, child in list(module.named_modules()):
        if type(child) is nn.Dropout:
            module.set_submodule(name, _Dropout(child.p))

    def spread(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            DTensor.from_local(one, mesh, _placement(cut.given, one.dim()), run_check=False)
            if isinstance(one, Tensor)
            else one
            for one in inputs
        )

    def collect(_: nn.Module, inputs: Any, output: Any) -> Tensor:
        local: Tensor = output.redistribute(
            placements=_placement(cut.gives, output.dim())
        ).to_local()
        return local

    module.register_forward_pre_hook(spread)
    module.register_forward_hook(collect)


def _dim_of(name: str, axis: str | None) -> int | None:
    """The dimension of a module's parameter that is an axis of it, if one is."""
    # A module that is trained whole has its weight as parametrizations.weight.original, and .0.base
    parts = name.split(".")
    axes = _AXES.get(parts[1] if parts[0] == "parametrizations" else name, ())
    return axes.index(axis) if axis in axes else None


def _placement(dim: int | None, dims: int = 0) -> "list[Placement]":
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim is None else Shard(dim % dims if dims else dim)]


class _Dropout(nn.Dropout):
    """Drops the same elements of a ``DTensor`` as of the whole tensor on one device.

    Every rank draws for all elements, so that the ranks of a group stay in step.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        from torch.distributed.tensor import DTensor

        assert isinstance(x, DTensor)  # as what computes with cut parameters is given
        ones = torch.ones(x.shape, dtype=x.dtype, device=local_tensor(x).device)
        kept = F.dropout(ones, self.p)[part_held(x, "the input of dropout")]
        dropped = x.to_local() * kept
        return DTensor.from_local(dropped, x.device_mesh, x.placements, run_check=False)
