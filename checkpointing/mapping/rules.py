"""The words in which a family is described: native modules, and rules to foreign names.

``{layer}`` in a name stands for the number of a transformer layer, ``{expert}`` in a foreign name
for the number of one of its experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from checkpointing.mapping.axis_ops import IDENTITY, AxisOp, Recast
from checkpointing.mapping.model_config import Dims

LAYER = "{layer}"
EXPERT = "{expert}"
_STEM = "{stem}"


@dataclass(frozen=True)
class Parameter:
    """One tensor of a module: its last names, and which axis of the map each dimension is.

    Attributes:
        native: name within the native module; empty where the module is the tensor itself.
            ``{stem}`` stands for the module's last name without ``_proj``; such a tensor lies
            beside the module.
        foreign: name within the foreign module; empty where that is the tensor itself.
        axes: for each dimension ``"out"`` or ``"in"`` of the linear map, ``"rank"``, or
            ``"expert"``, along which the maps of several experts are stacked. Any other word is
            the field of ``Dims`` with the length of a dimension on which no axis op acts.
        foreign_axes: the same for the foreign tensor, if it is another order. Without
            ``"expert"``, each expert has a foreign tensor of its own.
        recast: makes the foreign dimensions of the native ones where they are not the same in
            another order; ``None`` where they are.
    """

    native: str
    foreign: str
    axes: tuple[str, ...]
    foreign_axes: tuple[str, ...] = ()
    recast: Recast | None = None

    def __post_init__(self) -> None:
        if not self.foreign_axes:
            object.__setattr__(self, "foreign_axes", self.axes)

    def native_name(self, module: str) -> str:
        """Full native name of this tensor of a module."""
        if _STEM in self.native:
            parent, _, last = module.rpartition(".")
            return f"{parent}.{self.native.replace(_STEM, last.removesuffix('_proj'))}"
        return f"{module}.{self.native}" if self.native else module

    def foreign_name(self, module: str) -> str:
        """Full foreign name of this tensor of a foreign module."""
        return f"{module}.{self.foreign}" if self.foreign else module

    def module_of(self, name: str) -> str | None:
        """The native module of which this is the tensor of that name; ``None`` if of none."""
        if _STEM not in self.native:
            suffix = f".{self.native}"
            return name.removesuffix(suffix) if name.endswith(suffix) else None
        parent, _, last = name.rpartition(".")
        before, _, after = self.native.partition(_STEM)
        stem = last.removeprefix(before).removesuffix(after)
        return f"{parent}.{stem}_proj" if last == f"{before}{stem}{after}" else None


WEIGHT = Parameter("weight", "weight", ("out", "in"))
BIAS = Parameter("bias", "bias", ("out",))
SCALE = Parameter("scale", "weight", ("out",))
# An embedding maps a one-hot token (in) to a vector (out), and stores the transpose.
TABLE = Parameter("weight", "weight", ("in", "out"))
# Experts are stacked natively, as torchtune has them, and apart in most checkpoints.
EXPERTS = Parameter("", "weight", ("expert", "in", "out"), ("out", "in"))
# Of a layer norm, which unlike an RMS norm also has a bias.
NORM_WEIGHT = Parameter("weight", "weight", ("out",))

# Adapter tensors; the foreign names are PEFT's.
LORA_A = Parameter("lora_a.weight", "lora_A.weight", ("rank", "in"))
LORA_B = Parameter("lora_b.weight", "lora_B.weight", ("out", "rank"))
LORA_B_BIAS = Parameter("lora_b.bias", "lora_B.bias", ("out",))
MAGNITUDE = Parameter("magnitude", "lora_magnitude_vector", ("out",))
TABLE_A = Parameter("lora_embedding_a.weight", "lora_embedding_A", ("rank", "in"))
TABLE_B = Parameter("lora_embedding_b.weight", "lora_embedding_B", ("out", "rank"))
TABLE_MAGNITUDE = Parameter("lora_embedding_magnitude", "lora_magnitude_vector", ("out",))
EXPERTS_A = Parameter("lora_{stem}_a", "lora_A.weight", ("expert", "in", "rank"), ("rank", "in"))
EXPERTS_B = Parameter("lora_{stem}_b", "lora_B.weight", ("expert", "rank", "out"), ("out", "rank"))


@dataclass(frozen=True)
class AdapterKind:
    """The tensors of an adapter, for a kind of module; their native names tell the kind.

    Attributes:
        weight: the tensor that is adapted.
        a: LoRA's A.
        b: LoRA's B.
        magnitude: DoRA's magnitude; ``None`` if there is no DoRA for this kind.
        bias: a bias that is trained with B; ``None`` if this kind cannot have one.
    """

    weight: Parameter
    a: Parameter
    b: Parameter
    magnitude: Parameter | None = None
    bias: Parameter | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All tensors that it may have."""
        optional = (self.magnitude, self.bias)
        return (self.a, self.b, *(each for each in optional if each is not None))


LINEAR_ADAPTER = AdapterKind(WEIGHT, LORA_A, LORA_B, MAGNITUDE, LORA_B_BIAS)
EMBEDDING_ADAPTER = AdapterKind(TABLE, TABLE_A, TABLE_B, TABLE_MAGNITUDE)
EXPERTS_ADAPTER = AdapterKind(EXPERTS, EXPERTS_A, EXPERTS_B)
ADAPTER_KINDS = (LINEAR_ADAPTER, EMBEDDING_ADAPTER, EXPERTS_ADAPTER)


@dataclass(frozen=True)
class Module:
    """A native module.

    Attributes:
        name: native name.
        out: field of ``Dims`` with the size of the out axis.
        in_: field of ``Dims`` with the size of the in axis; empty where there is none.
        parameters: its tensors.
        bias: field of ``Dims`` that says whether the module has a bias; empty for never.
        layers: field of ``Dims`` with the numbers of the layers that have the module.
        adapter: the kind of adapter that it takes; ``None`` for none.
    """

    name: str
    out: str
    in_: str = ""
    parameters: tuple[Parameter, ...] = (WEIGHT,)
    bias: str = ""
    layers: str = "all_layers"
    adapter: AdapterKind | None = None

    def parameters_for(self, dims: Dims) -> tuple[Parameter, ...]:
        """The tensors that the module has in a model of these sizes."""
        biased = bool(self.bias) and getattr(dims, self.bias)
        return (*self.parameters, BIAS) if biased else self.parameters

    def sizes(self, dims: Dims, rank: int = 0) -> dict[str, int]:
        """Length of each axis that the module has, and of an adapter's rank."""
        sizes = {"out": getattr(dims, self.out), "expert": dims.experts, "rank": rank}
        if self.in_:
            sizes["in"] = getattr(dims, self.in_)
        return sizes

    def shape(self, parameter: Parameter, dims: Dims, rank: int = 0) -> tuple[int, ...]:
        """Native shape of a parameter, of an adapter's with its rank."""
        return lengths(parameter.axes, self.sizes(dims, rank), dims)


def lengths(axes: Sequence[str], sizes: Mapping[str, int], dims: Dims) -> tuple[int, ...]:
    """Length of each of a tensor's dimensions.

    Args:
        axes: what the dimensions are.
        sizes: of the axes of the module.
        dims: with the sizes of all others.
    """
    return tuple([sizes[axis] if axis in sizes else getattr(dims, axis) for axis in axes])


def linear(name: str, out: str, in_: str, bias: str = "") -> Module:
    """A linear layer with weight ``[out, in]``."""
    return Module(name, out, in_, (WEIGHT,), bias, adapter=LINEAR_ADAPTER)


def biased_linear(name: str, out: str, in_: str) -> Module:
    """A linear layer with weight ``[out, in]`` and, in every model, bias ``[out]``."""
    return Module(name, out, in_, (WEIGHT, BIAS), adapter=LINEAR_ADAPTER)


def experts(name: str, out: str, in_: str) -> Module:
    """The same linear layer of all experts, with weights ``[experts, in, out]``."""
    return Module(name, out, in_, (EXPERTS,), layers="expert_layers", adapter=EXPERTS_ADAPTER)


def embedding(name: str, vocab: str, width: str) -> Module:
    """A token embedding with weight ``[vocab, width]``."""
    return replace(table(name, vocab, width), adapter=EMBEDDING_ADAPTER)


def table(name: str, rows: str, width: str) -> Module:
    """An embedding that takes no adapter, with weight ``[rows, width]``."""
    return Module(name, width, rows, (TABLE,))


def norm(name: str, size: str) -> Module:
    """An RMS norm with scale ``[size]``."""
    return Module(name, size, "", (SCALE,))


def layer_norm(name: str, size: str) -> Module:
    """A layer norm with weight and bias ``[size]``."""
    return Module(name, size, "", (NORM_WEIGHT, BIAS))


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
        part: the foreign module is fused of several native ones, one after the other along one of
            its axes, and this is the one of that number; ``None`` where it is not fused.
        along: the axis along which it is fused.
        groups: field of ``Dims`` with the number of groups that a fused module is laid out in, each
            with an equal piece of every part, as the queries of a key-value head lie before it;
            empty for whole parts. The axis is then the first dimension of all tensors.
        layers: field of ``Dims`` with the foreign numbers of the layers that have the module, in
            step with the native ones; empty where they are the same.

    Where ``{expert}`` is in the foreign name, each expert has a foreign module of its own.
    """

    native: str
    foreign: str
    out: AxisOp = IDENTITY
    in_: AxisOp = IDENTITY
    split: tuple[str, ...] = ()
    part: int | None = None
    along: str = "out"
    groups: str = ""
    layers: str = ""


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
    for layer in dims.all_layers:
        yield name.replace(LAYER, str(layer))
