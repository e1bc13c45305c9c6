"""Plans: every output tensor, what it is made from and how, known before a byte moves.

Building a plan finds all that does not fit, and reports it together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.axis_ops import NotRepresentableError
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import Parameter
from checkpointing.mapping.tensors import LazyTensors, Rows, TensorMeta, TensorSource


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One output.

    Attributes:
        name: its name.
        meta: its shape and dtype.
        sources: names of the inputs it is made from.
        convert: carries the inputs to the output, a few rows at a time where it works so.
    """

    name: str
    meta: TensorMeta
    sources: tuple[str, ...]
    convert: Callable[[Sequence[Rows]], Rows]


@dataclass(frozen=True)
class Plan:
    """What will be read, computed and handed over, in this order.

    Attributes:
        tensors: the outputs.
        subject: names the model in errors.
        copies: names of outputs that are others over again, and of these, which come before them.
    """

    tensors: tuple[PlannedTensor, ...]
    subject: str
    copies: Mapping[str, str] = field(default_factory=dict)

    def over(self, source: TensorSource) -> LazyTensors:
        """The planned outputs, computed from the source one at a time as they are read."""
        return LazyTensors(
            {planned.name: planned.meta for planned in self.tensors},
            {planned.name: partial(self._convert, planned, source) for planned in self.tensors},
            self.copies,
        )

    def _convert(self, planned: PlannedTensor, source: TensorSource) -> Rows:
        @contextmanager
        def explained() -> Iterator[None]:
            try:
                yield
            except NotRepresentableError as error:
                problem = f"{', '.join(planned.sources)}: {error}"
                remedy = f"{planned.name} would not hold exactly the same, so nothing is converted."
                raise TensorMismatchError(self.subject, [problem], remedy) from None

        return planned.convert([source.rows(name) for name in planned.sources]).within(explained)


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

    def joined(
        self,
        name: str,
        sources: Sequence[str],
        metas: Sequence[TensorMeta | None],
        shape: tuple[int, ...],
    ) -> TensorMeta:
        """What is made of inputs, which must be of one dtype."""
        dtypes = {meta.dtype for meta in metas if meta is not None}
        if len(dtypes) > 1:
            self.refuse(f"{', '.join(sources)}: {name} is made of them, but their dtypes differ")
        return TensorMeta(shape, next(iter(dtypes), torch.float32))

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


def plan_to_native(
    layout: Layout,
    foreign: Mapping[str, TensorMeta],
    subject: str,
    modules: Set[str] | None = None,
) -> Plan:
    """Plans the native tensors of a foreign model.

    Args:
        layout: the model's family, format and sizes.
        foreign: the tensors that there are.
        subject: names the checkpoint in errors.
        modules: full native names of the only ones that are there; by default all are.

    Raises:
        TensorMismatchError: lists every tensor that is missing, unexpected or misshaped.
    """
    inputs = _Inputs(foreign)
    planned = []
    for name, pairs in _grouped(layout, native=True, modules=modules).items():
        sources = tuple(parameter.foreign_name(pair.foreign) for pair, parameter in pairs)
        pair, parameter = pairs[0]
        # The experts of a layer are alike.
        shape = pair.foreign_shape(parameter)
        metas = [inputs.claim(source, shape) for source in sources]
        meta = inputs.joined(name, sources, metas, pair.native_shape(parameter))
        planned.append(PlannedTensor(name, meta, sources, partial(_to_native, pairs)))
    inputs.finish(subject, layout.optional(), _remedy(layout))
    return Plan(tuple(planned), subject)


_Pairs = list[tuple[ModulePair, Parameter]]


def _grouped(layout: Layout, native: bool, modules: Set[str] | None) -> dict[str, _Pairs]:
    """What each native, or each foreign, tensor is made of, in order.

    Args:
        layout: of the model.
        native: the native tensors.
        modules: only what is made of one of these, which may take others too.
    """
    groups: dict[str, _Pairs] = {}
    for pair, parameter in layout.parameters():
        foreign_name = parameter.foreign_name(pair.foreign)
        name = parameter.native_name(pair.native) if native else foreign_name
        groups.setdefault(name, []).append((pair, parameter))
    for pairs in groups.values():
        pairs.sort(key=lambda one: (one[0].start, one[0].expert or 0))
    if modules is None:
        return groups
    return {
        name: pairs
        for name, pairs in groups.items()
        if any(pair.native in modules for pair, _ in pairs)
    }


def _to_native(pairs: _Pairs, foreign: Sequence[Rows]) -> Rows:
    native = [
        pair.rows_to_native(pair.part_of_rows(rows, parameter), parameter)
        for (pair, parameter), rows in zip(pairs, foreign, strict=True)
    ]
    pair, parameter = pairs[0]
    if pair.expert is None:
        return native[0]
    dim = parameter.axes.index("expert")

    def stacked(start: int, stop: int) -> Tensor:
        return torch.stack([one.read_all() for one in native[start:stop]], dim)

    if dim == 0:
        return Rows(len(native), 1, stacked)
    return Rows.whole(pair.native_shape(parameter), lambda: stacked(0, len(native)))


def plan_to_foreign(
    layout: Layout,
    native: Mapping[str, TensorMeta],
    subject: str,
    modules: Set[str] | None = None,
) -> Plan:
    """Plans the foreign tensors of a native model; the inverse of :func:`plan_to_native`.

    Raises:
        TensorMismatchError: lists every tensor that is missing, unexpected or misshaped.
    """
    inputs = _Inputs(native)
    planned = {}
    for name, pairs in _grouped(layout, native=False, modules=modules).items():
        sources = tuple(parameter.native_name(pair.native) for pair, parameter in pairs)
        metas = [
            inputs.claim(source, pair.native_shape(parameter))
            for source, (pair, parameter) in zip(sources, pairs, strict=True)
        ]
        pair, parameter = pairs[0]
        meta = inputs.joined(name, sources, metas, pair.foreign_shape(parameter))
        planned[name] = PlannedTensor(name, meta, sources, partial(_to_foreign, pairs))
    inputs.finish(subject, set(), _remedy(layout))
    copies = {
        foreign: f"{pair.foreign}.weight"
        for foreign, pair, written in layout.copies()
        if written and f"{pair.foreign}.weight" in planned
    }
    copied = [replace(planned[own], name=name) for name, own in copies.items()]
    return Plan((*planned.values(), *copied), subject, copies)


def _to_foreign(pairs: _Pairs, native: Sequence[Rows]) -> Rows:
    foreign = [
        pair.rows_to_foreign(pair.slice_of_rows(rows, parameter), parameter)
        for (pair, parameter), rows in zip(pairs, native, strict=True)
    ]
    if len(foreign) == 1:
        return foreign[0]
    pair, parameter = pairs[0]
    if pair.groups > 1:
        return Rows.concatenated(_interleaved(foreign, pair.groups))
    dim = parameter.foreign_axes.index(pair.rule.along)
    return Rows.side_by_side(foreign, dim) if dim else Rows.concatenated(foreign)


def _interleaved(parts: Sequence[Rows], groups: int) -> list[Rows]:
    """A piece of each part for every group."""
    sizes = [part.count // groups for part in parts]
    return [
        part.narrow(group * size, size)
        for group in range(groups)
        for part, size in zip(parts, sizes, strict=True)
    ]


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
