"""The words in which a family is described: native modules, and rules to foreign names.

``{layer}`` in a name stands for the number of a transformer layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from checkpointing.mapping.axis_ops import IDENTITY, AxisOp
from checkpointing.mapping.model_config import Dims

LAYER = "{layer}"


@dataclass(frozen=True)
class Parameter:
    """One tensor of a module: its last names, and which axis of the map each dimension is.

    Attributes:
        native: name within the native module.
        foreign: name within the foreign module.
        axes: for each dimension ``"out"`` or ``"in"`` of the linear map, or ``"rank"``.
    """

    native: str
    foreign: str
    axes: tuple[str, ...]


WEIGHT = Parameter("weight", "weight", ("out", "in"))
BIAS = Parameter("bias", "bias", ("out",))
SCALE = Parameter("scale", "weight", ("out",))
# An embedding maps a one-hot token (in) to a vector (out), and stores the transpose.
TABLE = Parameter("weight", "weight", ("in", "out"))

# Adapter tensors; the foreign names are PEFT's.
LORA_A = Parameter("lora_a.weight", "lora_A.weight", ("rank", "in"))
LORA_B = Parameter("lora_b.weight", "lora_B.weight", ("out", "rank"))
MAGNITUDE = Parameter("magnitude", "lora_magnitude_vector", ("out",))
ADAPTER_PARAMETERS = (LORA_A, LORA_B, MAGNITUDE)


@dataclass(frozen=True)
class Module:
    """A native module.

    Attributes:
        name: native name.
        out: field of ``Dims`` with the size of the out axis.
        in_: field of ``Dims`` with the size of the in axis; empty where there is none.
        parameters: its tensors.
        bias: field of ``Dims`` that says whether the module has a bias; empty for never.
    """

    name: str
    out: str
    in_: str = ""
    parameters: tuple[Parameter, ...] = (WEIGHT,)
    bias: str = ""

    def parameters_for(self, dims: Dims) -> tuple[Parameter, ...]:
        """The tensors that the module has in a model of these sizes."""
        biased = bool(self.bias) and getattr(dims, self.bias)
        return (*self.parameters, BIAS) if biased else self.parameters

    def shape(self, parameter: Parameter, dims: Dims) -> tuple[int, ...]:
        """Native shape of a parameter that has no rank dimension."""
        sizes = {"out": self.out, "in": self.in_}
        return tuple(getattr(dims, sizes[axis]) for axis in parameter.axes)

    @property
    def takes_adapter(self) -> bool:
        """Whether LoRA applies: the module is linear."""
        return WEIGHT in self.parameters


def linear(name: str, out: str, in_: str, bias: str = "") -> Module:
    """A linear layer with weight ``[out, in]``."""
    return Module(name, out, in_, (WEIGHT,), bias)


def embedding(name: str, vocab: str, width: str) -> Module:
    """A token embedding with weight ``[vocab, width]``."""
    return Module(name, width, vocab, (TABLE,))


def norm(name: str, size: str) -> Module:
    """An RMS norm with scale ``[size]``."""
    return Module(name, size, "", (SCALE,))


@dataclass(frozen=True)
class Rule:
    """A native and a foreign module hold the same numbers.

    Attributes:
        native: name of the native module.
        foreign: name of the foreign module.
        out: what happens to the out axis.
        in_: what happens to the in axis.
        split: axes along which model-parallel shards may be cut, the likelier first; empty where
            every shard holds the whole tensor.
        part: the foreign module is fused of several native ones, one after the other along its out
            axis, and this is the one of that number; ``None`` where it is not fused.
    """

    native: str
    foreign: str
    out: AxisOp = IDENTITY
    in_: AxisOp = IDENTITY
    split: tuple[str, ...] = ()
    part: int | None = None


@dataclass(frozen=True)
class Tied:
    """The native module exists only in models whose output projection is not tied.

    Attributes:
        native: name of the native module that a tied model lacks.
        to: name of the native module whose weight takes its place.
        written: the foreign layout stores the copy all the same.
    """

    native: str
    to: str
    written: bool


@dataclass(frozen=True)
class Dropped:
    """A foreign tensor that holds nothing that the config does not say, such as RoPE tables."""

    foreign: str


def expand(name: str, dims: Dims) -> Iterator[str]:
    """The names that a pattern stands for, in the order of the layers."""
    if LAYER not in name:
        yield name
        return
    for layer in range(dims.layers):
        yield name.replace(LAYER, str(layer))
