"""PEFT's packed form of adapters on experts: one pair of matrices for all experts of a layer.

transformers 5 holds a layer's experts in two parameters, ``gate_up_proj`` and ``down_proj``, which
PEFT adapts as ``target_parameters`` (https://github.com/huggingface/peft,
``src/peft/tuners/lora/layer.py``, ``ParamWrapper``). With E experts and rank r, A is
``(E r, in)``, with the expert slowest, and B is ``(out, r E)``, with the expert *fastest*. Where
both parameters are adapted, the tensors of ``gate_up_proj`` lie in ``experts.base_layer`` and those
of ``down_proj`` in ``experts``.

PEFT takes the second dimension of a parameter for its out axis. In Llama 4 it is the in axis, so
that there A and B change places: A is ``(E r, out)`` and B ``(in, r E)``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.errors import ConfigError
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.rules import EXPERTS_A, EXPERTS_B
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource, is_sharded

# The packed parameters, and the native projections in each, along its out axis.
PACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERTS = ".experts"
EXPERTS_GATE = "layers.{layer}.mlp.experts.gate_proj"
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class ExpertsModule:
    """The experts of a layer.

    Attributes:
        native: native name, such as ``layers.0.mlp.experts``.
        foreign: name of the module in transformers.
        experts: their number.
        hidden: width of the residual stream.
        ffn: width of an expert's inner layer.
        is_swapped: PEFT takes the in axis of the parameters for the out axis.
    """

    native: str
    foreign: str
    experts: int
    hidden: int
    ffn: int
    is_swapped: bool

    def sizes(self, parameter: str) -> tuple[int, int]:
        """Lengths of the in axis, and of the out axis of each part, of a packed parameter."""
        return (self.ffn, self.hidden) if parameter == "down_proj" else (self.hidden, self.ffn)

    def natives(self, parameter: str) -> list[str]:
        """The native modules in a packed parameter."""
        return [f"{self.native}.{last}" for last in PACKED[parameter]]

    @property
    def all_natives(self) -> list[str]:
        """The native modules in all packed parameters."""
        return [name for parameter in PACKED for name in self.natives(parameter)]

    def shapes(self, parameter: str, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of PEFT's A and B."""
        in_, out = self.sizes(parameter)
        first, second = in_, out * len(PACKED[parameter])
        if self.is_swapped:
            first, second = second, first
        return (self.experts * rank, first), (second, rank * self.experts)


def experts_modules(layout: Layout) -> dict[str, ExpertsModule]:
    """The experts of every layer that has some, by their name in transformers."""
    found = {}
    dims = layout.dims
    for pair in layout.pairs:
        if pair.module.name == EXPERTS_GATE:
            stored = pair.foreign.partition(_EXPERTS)[0] + _EXPERTS
            name = layout.family.name_in_transformers(stored)
            native = pair.native.rpartition(".")[0]
            # Stored together only where the parameters are stored as transformers holds them.
            swapped = pair.expert is None
            found[name] = ExpertsModule(
                native, name, dims.experts, dims.hidden, dims.expert_ffn, swapped
            )
    return found


def packed_key(module: str, parameter: str, adapted: Sequence[str]) -> str:
    """Where PEFT keeps the tensors of a packed parameter.

    Args:
        module: name of the experts.
        parameter: ``gate_up_proj`` or ``down_proj``.
        adapted: those of the two that carry an adapter.
    """
    inner = parameter == "gate_up_proj" and len(adapted) == len(PACKED)
    return f"{module}.base_layer" if inner else module


@dataclass(frozen=True)
class PackedParameter:
    """An adapter on a packed parameter, as PEFT stores it.

    Attributes:
        key: what the names of its tensors begin with.
        name: full name of the parameter.
        rank: its rank, the sum of those of its parts.
        scale: what ``B A`` is multiplied with.
    """

    key: str
    name: str
    rank: int
    scale: float


@dataclass(frozen=True)
class PackedExperts:
    """Adapters on experts as PEFT stores them.

    Attributes:
        tensors: by PEFT's names.
        parameters: what they adapt.
        target_parameters: the config's field.
    """

    tensors: LazyTensors
    parameters: tuple[PackedParameter, ...]
    target_parameters: list[str]


def pack(
    adapter: TensorSource, config: AdapterConfig, layout: Layout, carrying: set[str], prefix: str
) -> PackedExperts:
    """The adapters on experts in PEFT's packed form.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        layout: the base's layout in the Hugging Face format.
        carrying: native modules that carry an adapter.
        prefix: of the names of the tensors.
    """
    metas: dict[str, TensorMeta] = {}
    compute = {}
    packed = []
    for module in experts_modules(layout).values():
        parts = {
            parameter: [name for name in module.natives(parameter) if name in carrying]
            for parameter in PACKED
        }
        adapted = [parameter for parameter in PACKED if parts[parameter]]
        for parameter in adapted:
            names = parts[parameter]
            key = prefix + packed_key(module.foreign, parameter, adapted)
            rank, scale = sum(map(config.rank, names)), config.scale(names[0])
            packed.append(PackedParameter(key, f"{module.foreign}.{parameter}", rank, scale))
            factors = {name: config.scale(name) / scale for name in names}
            for end, shape in zip((_A, _B), module.shapes(parameter, rank), strict=True):
                is_a = (end == _A) != module.is_swapped
                own = EXPERTS_A if is_a else EXPERTS_B
                dtypes = [adapter.metas[own.native_name(name)].dtype for name in names]
                if not is_a and set(factors.values()) != {1.0}:
                    dtypes.append(torch.float32)  # for products that a shorter dtype would round
                meta = TensorMeta(shape, reduce(torch.promote_types, dtypes))
                metas[key + end] = meta
                compute[key + end] = partial(
                    _packed, adapter, module, parameter, factors, is_a, meta.dtype
                )
    return PackedExperts(
        LazyTensors.of_whole(metas, compute, gathers=is_sharded(adapter)),
        tuple(packed),
        target_parameters([one.name for one in packed], layout),
    )


def _packed(
    adapter: TensorSource,
    module: ExpertsModule,
    parameter: str,
    factors: Mapping[str, float],
    is_a: bool,
    dtype: torch.dtype,
) -> Tensor:
    """One of the two matrices, as PEFT stores it: the native A of all parts, or their B.

    The update of an expert is ``A B``, ``(in, ranks)`` times ``(ranks, rows)``, where the parts' A
    stand side by side and their B on the diagonal.
    """
    if is_a:
        parts = [adapter.read(EXPERTS_A.native_name(name)).to(dtype) for name in factors]
        matrix = torch.cat(parts, dim=2)
        return _second(matrix) if module.is_swapped else _first(matrix.mT)
    blocks = []
    _, out = module.sizes(parameter)
    for name, factor in factors.items():
        part = adapter.read(EXPERTS_B.native_name(name)).to(dtype)
        block = part.new_zeros(*part.shape[:2], out * len(PACKED[parameter]))
        start = module.natives(parameter).index(name) * out
        block[..., start : start + out] = part * factor
        blocks.append(block)
    matrix = torch.cat(blocks, dim=1)
    return _first(matrix) if module.is_swapped else _second(matrix.mT)


def _first(matrices: Tensor) -> Tensor:
    """``(experts, rank, size)`` as PEFT's A, ``(experts * rank, size)``."""
    return matrices.flatten(0, 1)


def _second(matrices: Tensor) -> Tensor:
    """``(experts, size, rank)`` as PEFT's B, ``(size, rank * experts)``."""
    return matrices.permute(1, 2, 0).flatten(1)


def target_parameters(names: Iterable[str], layout: Layout) -> list[str]:
    """Last two names where they mean all parameters that end so, else full names."""
    by_last: dict[str, list[str]] = {}
    for name in names:
        by_last.setdefault(".".join(name.split(".")[-2:]), []).append(name)
    layers = len(layout.dims.expert_layers)
    return [
        target
        for last, full in by_last.items()
        for target in ([last] if len(full) == layers else full)
    ]


def bare_parameters(layout: Layout, carrying: set[str]) -> dict[str, str]:
    """Modules that transformers holds as bare parameters, and what PEFT calls these.

    Args:
        layout: the base's layout in the Hugging Face format.
        carrying: native modules that carry an adapter.
    """
    family = layout.family
    return {
        pair.foreign: f"{family.name_in_transformers(pair.foreign)}.weight"
        for pair in layout.pairs
        if pair.native in carrying and pair.module.name in family.bare_in_transformers
    }


def left_out_by_peft(layout: Layout, carrying: set[str]) -> tuple[str, ...]:
    """What to say of an adapter of which PEFT loads a part only.

    Beside experts, PEFT (0.21) takes the names of dense feed-forward modules for theirs.
    """
    if not any(not module.is_swapped for module in experts_modules(layout).values()):
        return ()
    dense = [
        pair.native
        for pair in layout.pairs
        if pair.native in carrying and pair.module.layers == "dense_layers"
    ]
    if not dense:
        return ()
    return (
        f"PEFT leaves out the adapters on {len(dense)} feed-forward modules of dense layers, such "
        f"as {dense[0]}, whose names it takes for those of experts; engines and this project read "
        "them, and the merged model has them",
    )


def check_packable(layout: Layout, carrying: set[str], use_dora: bool) -> None:
    """Checks that PEFT itself can hold an adapter, for which it is written exactly.

    Raises:
        ConfigError: if it could not, or would leave a part of it out.
    """
    notes = left_out_by_peft(layout, carrying)
    if notes:
        raise ConfigError(f"{notes[0]}. Write the portable form, or adapt only the experts")
    bare = bare_parameters(layout, carrying)
    if use_dora and bare:
        raise ConfigError(
            f"{next(iter(bare))}: PEFT has no DoRA for it; leave it out of the target modules"
        )


@dataclass(frozen=True)
class _Unpacked:
    """A packed parameter that was found in a file.

    Attributes:
        module: the experts.
        parameter: ``gate_up_proj`` or ``down_proj``.
        key: what the names of its tensors begin with.
        rank: of the adapter on it.
    """

    module: ExpertsModule
    parameter: str
    key: str
    rank: int


@dataclass(frozen=True)
class UnpackedExperts:
    """The native form of the packed adapters in a file.

    Attributes:
        tensors: native adapter tensors.
        ranks: rank by native module.
        names: for each native module the full name of the packed parameter that it is in, for
            which patterns are written.
        keys: the tensors of the file that they were made of.
        problems: what is wrong with these, one line each.
    """

    tensors: LazyTensors
    ranks: Mapping[str, int]
    names: Mapping[str, str]
    keys: frozenset[str]
    problems: tuple[str, ...]


def unpack(
    tensors: TensorSource, layout: Layout, target_parameters: Sequence[str]
) -> UnpackedExperts:
    """Finds the packed adapters in a PEFT file.

    Both parts of ``gate_up_proj`` get its A, and each its rows of B.

    Args:
        tensors: of the file.
        layout: the base's layout in the Hugging Face format.
        target_parameters: of the config; tells which parameter it is, if only one is adapted.
    """
    modules = experts_modules(layout)
    single = [p for p in PACKED if any(t.rpartition(".")[2] == p for t in target_parameters)]
    problems: list[str] = []
    keys: set[str] = set()
    found: list[_Unpacked] = []
    for key in tensors.metas:
        if not key.endswith(_A):
            continue
        start = key.removesuffix(_A)
        name = start.removesuffix(".base_layer")
        module = _named(modules, name)
        if module is None:
            continue
        if start != name:
            parameter = "gate_up_proj"
        elif f"{name}.base_layer{_A}" in tensors.metas:
            parameter = "down_proj"
        elif len(single) == 1:
            parameter = single[0]
        else:
            problems.append(f"{key}: target_parameters does not tell which parameter it adapts")
            continue
        keys |= {key, start + _B}
        first, second = tensors.metas[key].shape, tensors.metas.get(start + _B)
        rank = first[0] // module.experts
        wanted = module.shapes(parameter, rank)
        if first != wanted[0] or not rank:
            of_one = f"[{module.experts} * rank, {wanted[0][1]}]"
            problems.append(f"{key}: {list(first)}, expected {of_one}")
        elif second is None:
            problems.append(f"{start}{_B}: missing, expected {list(wanted[1])}")
        elif second.shape != wanted[1]:
            problems.append(f"{start}{_B}: {list(second.shape)}, expected {list(wanted[1])}")
        else:
            found.append(_Unpacked(module, parameter, start, rank))
    metas: dict[str, TensorMeta] = {}
    compute = {}
    ranks, names = {}, {}
    for one in found:
        in_, out = one.module.sizes(one.parameter)
        experts, rank = one.module.experts, one.rank
        ends = (_B, _A) if one.module.is_swapped else (_A, _B)
        dtype_a, dtype_b = (tensors.metas[one.key + end].dtype for end in ends)
        for part, native in enumerate(one.module.natives(one.parameter)):
            ranks[native] = rank
            names[native] = f"{one.module.foreign}.{one.parameter}"
            name_a, name_b = EXPERTS_A.native_name(native), EXPERTS_B.native_name(native)
            metas[name_a] = TensorMeta((experts, in_, rank), dtype_a)
            metas[name_b] = TensorMeta((experts, rank, out), dtype_b)
            compute[name_a] = partial(_unpacked, tensors, one, True)
            compute[name_b] = partial(_unpacked, tensors, one, False, part * out, out)
    return UnpackedExperts(
        LazyTensors.of_whole(metas, compute), ranks, names, frozenset(keys), tuple(problems)
    )


def _named(modules: Mapping[str, ExpertsModule], name: str) -> ExpertsModule | None:
    """The module whose name a longer one ends with."""
    while name and name not in modules:
        name = name.partition(".")[2]
    return modules.get(name)


def _unpacked(
    tensors: TensorSource, one: _Unpacked, is_a: bool, start: int = 0, size: int = 0
) -> Tensor:
    """The native A of a part, or its rows of B; the inverse of :func:`_packed`."""
    split = one.rank, one.module.experts
    if is_a != one.module.is_swapped:
        first = tensors.read(one.key + _A).unflatten(0, split[::-1])
        matrix = first.mT if is_a else first
    else:
        second = tensors.read(one.key + _B).unflatten(1, split).permute(2, 0, 1)
        matrix = second if is_a else second.mT
    return matrix if is_a else matrix[..., start : start + size]
