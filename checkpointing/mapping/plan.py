"""Plans: every output tensor, what it is made from and how, known before a byte moves.

Building a plan finds all that does not fit, and reports it together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource


@dataclass(frozen=True)
class PlannedTensor:
    """One output.

    Attributes:
        name: its name.
        meta: its shape and dtype.
        source: name of the input it is made from.
        convert: carries the input to the output.
    """

    name: str
    meta: TensorMeta
    source: str
    convert: Callable[[Tensor], Tensor]


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
    return planned.convert(source.read(planned.source))


class _Builder:
    """Collects planned tensors and problems; every input must be claimed once."""

    def __init__(self, inputs: Mapping[str, TensorMeta]) -> None:
        self.inputs = inputs
        self.planned: list[PlannedTensor] = []
        self.problems: list[str] = []
        self.claimed: set[str] = set()

    def add(
        self,
        source: str,
        expected: tuple[int, ...],
        name: str,
        shape: tuple[int, ...],
        convert: Callable[[Tensor], Tensor],
    ) -> None:
        self.claimed.add(source)
        meta = self.inputs.get(source)
        if meta is None:
            self.problems.append(f"{source}: missing, expected {list(expected)}")
        elif meta.shape != expected:
            self.problems.append(f"{source}: {list(meta.shape)}, expected {list(expected)}")
        else:
            planned = PlannedTensor(name, TensorMeta(shape, meta.dtype), source, convert)
            self.planned.append(planned)

    def finish(self, subject: str, ignored: set[str], remedy: str) -> Plan:
        for name, meta in self.inputs.items():
            if name not in self.claimed and name not in ignored:
                self.problems.append(f"{name}: unexpected, {list(meta.shape)}")
        if self.problems:
            raise TensorMismatchError(subject, self.problems, remedy)
        return Plan(tuple(self.planned))


def plan_to_native(layout: Layout, foreign: Mapping[str, TensorMeta], subject: str) -> Plan:
    """Plans the native tensors of a foreign model.

    Args:
        layout: the model's family, format and sizes.
        foreign: the tensors that there are.
        subject: names the checkpoint in errors.

    Raises:
        TensorMismatchError: lists every tensor that is missing, unexpected or misshaped.
    """
    builder = _Builder(foreign)
    for pair, parameter in layout.parameters():
        builder.add(
            f"{pair.foreign}.{parameter.foreign}",
            pair.foreign_shape(parameter),
            f"{pair.native}.{parameter.native}",
            pair.native_shape(parameter),
            partial(pair.to_native, parameter=parameter),
        )
    return builder.finish(subject, layout.optional(), _remedy(layout))


def plan_to_foreign(layout: Layout, native: Mapping[str, TensorMeta], subject: str) -> Plan:
    """Plans the foreign tensors of a native model; the inverse of :func:`plan_to_native`.

    Raises:
        TensorMismatchError: lists every tensor that is missing, unexpected or misshaped.
    """
    builder = _Builder(native)
    for pair, parameter in layout.parameters():
        builder.add(
            f"{pair.native}.{parameter.native}",
            pair.native_shape(parameter),
            f"{pair.foreign}.{parameter.foreign}",
            pair.foreign_shape(parameter),
            partial(pair.to_foreign, parameter=parameter),
        )
    plan = builder.finish(subject, set(), _remedy(layout))
    by_source = {planned.source: planned for planned in plan.tensors}
    written_copies = tuple(
        PlannedTensor(foreign, original.meta, original.source, original.convert)
        for foreign, pair, written in layout.copies()
        if written
        for original in [by_source[f"{pair.native}.weight"]]
    )
    return Plan(plan.tensors + written_copies)


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
