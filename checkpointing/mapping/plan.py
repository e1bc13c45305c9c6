"""Plans: every output tensor, what it is made from and how, known before a byte moves.

Building a plan finds all that does not fit, and reports it together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import Parameter
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource


@dataclass(frozen=True)
class PlannedTensor:
    """One output.

    Attributes:
        name: its name.
        meta: its shape and dtype.
        sources: names of the inputs it is made from.
        convert: carries the inputs to the output.
    """

    name: str
    meta: TensorMeta
    sources: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Plan:
    """What will be read, computed and handed over, in this order."""

    tensors: tuple[PlannedTensor, ...]

    def over(self, source: TensorSource) -> LazyTensors:
        """The planned outputs, computed from the source one at a time as they are read."""
        return LazyTensors(
            {planned.name: planned.meta for planned in self.tensors},
            {planned.name: partial(_convert, planned, source) for planned in self.tensors},
        )


def _convert(planned: PlannedTensor, source: TensorSource) -> Tensor:
    return planned.convert([source.read(name) for name in planned.sources])


class _Inputs:
    """The inputs of a plan: each must be there, have its shape, and be claimed."""

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        self._metas = metas
        self._problems: dict[str, None] = {}
        self._claimed: set[str] = set()

    def claim(self, name: str, expected: tuple[int, ...]) -> TensorMeta | None:
        """The input, or ``None`` if something is wrong with it."""
        self._claimed.add(name)
        meta = self._metas.get(name)
        if meta is None:
            self.refuse(f"{name}: missing, expected {list(expected)}")
        elif meta.shape != expected:
            self.refuse(f"{name}: {list(meta.shape)}, expected {list(expected)}")
            return None
        return meta

    def refuse(self, problem: str) -> None:
        """Notes a problem, once."""
        self._problems[problem] = None

    def finish(self, subject: str, optional: set[str], remedy: str) -> None:
        """Raises if anything is wrong, or left over that may not be."""
        for name, meta in self._metas.items():
            if name not in self._claimed and name not in optional:
                self.refuse(f"{name}: unexpected, {list(meta.shape)}")
        if self._problems:
            raise TensorMismatchError(subject, list(self._problems), remedy)


def plan_to_native(layout: Layout, foreign: Mapping[str, TensorMeta], subject: str) -> Plan:
    """Plans the native tensors of a foreign model.

    Args:
        layout: the model's family, format and sizes.
        foreign: the tensors that there are.
        subject: names the checkpoint in errors.

    Raises:
        TensorMismatchError: lists every tensor that is missing, unexpected or misshaped.
    """
    inputs = _Inputs(foreign)
    planned = []
    for pair, parameter in layout.parameters():
        source = f"{pair.foreign}.{parameter.foreign}"
        meta = inputs.claim(source, pair.foreign_shape(parameter))
        if meta is not None:
            name = f"{pair.native}.{parameter.native}"
            shape = TensorMeta(pair.native_shape(parameter), meta.dtype)
            planned.append(
                PlannedTensor(name, shape, (source,), partial(_part_to_native, pair, parameter))
            )
    inputs.finish(subject, layout.optional(), _remedy(layout))
    return Plan(tuple(planned))


def _part_to_native(pair: ModulePair, parameter: Parameter, foreign: Sequence[Tensor]) -> Tensor:
    return pair.to_native(pair.part_of(foreign[0], parameter), parameter)


def plan_to_foreign(layout: Layout, native: Mapping[str, TensorMeta], subject: str) -> Plan:
    """Plans the foreign tensors of a native model; the inverse of :func:`plan_to_native`.

    Raises:
        TensorMismatchError: lists every tensor that is missing, unexpected or misshaped.
    """
    inputs = _Inputs(native)
    parts: dict[str, list[tuple[ModulePair, Parameter]]] = {}
    for pair, parameter in layout.parameters():
        parts.setdefault(f"{pair.foreign}.{parameter.foreign}", []).append((pair, parameter))
    planned = {}
    for name, fused in parts.items():
        fused.sort(key=lambda part: part[0].start)
        sources = tuple(f"{pair.native}.{parameter.native}" for pair, parameter in fused)
        metas = [
            inputs.claim(source, pair.native_shape(parameter))
            for source, (pair, parameter) in zip(sources, fused, strict=True)
        ]
        dtypes = {meta.dtype for meta in metas if meta is not None}
        if len(dtypes) > 1:
            inputs.refuse(f"{', '.join(sources)}: {name} is fused of them, but their dtypes differ")
        pair, parameter = fused[0]
        meta = TensorMeta(pair.foreign_shape(parameter), next(iter(dtypes), torch.float32))
        planned[name] = PlannedTensor(name, meta, sources, partial(_fuse, fused))
    inputs.finish(subject, set(), _remedy(layout))
    copies = [
        replace(planned[f"{pair.foreign}.weight"], name=foreign)
        for foreign, pair, written in layout.copies()
        if written
    ]
    return Plan((*planned.values(), *copies))


def _fuse(parts: Sequence[tuple[ModulePair, Parameter]], native: Sequence[Tensor]) -> Tensor:
    foreign = [
        pair.to_foreign(tensor, parameter)
        for (pair, parameter), tensor in zip(parts, native, strict=True)
    ]
    if len(foreign) == 1:
        return foreign[0]
    return torch.cat(foreign, parts[0][1].axes.index("out"))


def check_native(layout: Layout, native: Mapping[str, TensorMeta], subject: str) -> None:
    """Checks that a native state dict has exactly the tensors of the model.

    Raises:
        TensorMismatchError: lists every tensor that is missing, unexpected or misshaped.
    """
    plan_to_foreign(layout, native, subject)


def _remedy(layout: Layout) -> str:
    dims = layout.dims
    return (
        f"The tensors must be those of a {layout.family.name} model with {dims.layers} layers, "
        f"hidden size {dims.hidden}, {dims.heads} heads, {dims.kv_heads} key-value heads of width "
        f"{dims.head_dim}, feed-forward width {dims.ffn}, vocabulary {dims.vocab}"
        f"{', tied embeddings' if dims.tied else ''}: check that the config file and the weights "
        "belong together and that no file of the checkpoint is missing."
    )
