"""PEFT's adapter directory: ``adapter_model.safetensors`` and ``adapter_config.json``.

Key names and config fields as PEFT reads them (https://github.com/huggingface/peft,
``docs/source/developer_guides/checkpoint.md``).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import adapter_modules, check_adapter
from checkpointing.errors import ConfigError
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import LORA_A, LORA_B, MAGNITUDE, Parameter
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource

PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_WEIGHTS_TORCH = "adapter_model.bin"
PEFT_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter as PEFT stores it.

    Attributes:
        tensors: by PEFT's names.
        config: content of ``adapter_config.json``.
    """

    tensors: TensorSource
    config: dict[str, Any]


def to_peft(
    adapter: TensorSource, config: AdapterConfig, layout: Layout, base_model: str
) -> PeftAdapter:
    """A native adapter in PEFT's form.

    LoRA is written in the portable form, since inference engines ignore most of PEFT's config:
    one rank, and one scale ``alpha / r``; what differs from it is folded into ``B``. Modules that
    engines compute as one are all named if one of them carries an adapter, the others with zeros.
    DoRA, which no engine serves, is written exactly as PEFT has it.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        layout: the base's layout in the Hugging Face format.
        base_model: repository or directory of the base, for PEFT's config.

    Raises:
        TensorMismatchError: if the adapter does not fit the base, or is not whole.
    """
    pairs = {pair.native: pair for pair in layout.pairs if pair.module.takes_adapter}
    check_adapter(adapter.metas, config, _shapes(pairs, layout), "saving a PEFT adapter")
    carrying = adapter_modules(adapter.metas)
    if config.use_dora:
        modules = _foreign_modules(pairs, carrying, carrying)
        tensors, fields = _exact(adapter, config, modules)
    else:
        written = _with_fused(carrying, pairs, layout.family.fused_in_engines)
        modules = _foreign_modules(pairs, carrying, written)
        tensors, fields = _portable(adapter, config, modules)
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "target_modules": _target_modules(pairs, {module.name for module in modules}),
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "lora_bias": False,
        "init_lora_weights": True,
        **fields,
    }
    return PeftAdapter(tensors, peft_config)


def _shapes(pairs: Mapping[str, ModulePair], layout: Layout) -> dict[str, tuple[int, int]]:
    return {
        name: (getattr(layout.dims, pair.module.out), getattr(layout.dims, pair.module.in_))
        for name, pair in pairs.items()
    }


@dataclass(frozen=True)
class _ForeignModule:
    """A foreign module that is written, and the native ones that it is made of.

    Attributes:
        name: its name.
        out: length of its out axis.
        in_: length of its in axis.
        parts: the native modules in it that carry an adapter, in their order; more than one only
            if the module is fused.
        whole: all native modules in it carry an adapter.
    """

    name: str
    out: int
    in_: int
    parts: tuple[ModulePair, ...]
    whole: bool

    def rank(self, config: AdapterConfig) -> int:
        """Rank of its adapter: the ranks of its parts, stacked."""
        return sum(config.rank(part.native) for part in self.parts)


def _foreign_modules(
    pairs: Mapping[str, ModulePair], carrying: list[str], written: list[str]
) -> list[_ForeignModule]:
    grouped: dict[str, list[ModulePair]] = {}
    for pair in pairs.values():
        grouped.setdefault(pair.foreign, []).append(pair)
    modules = []
    for name in dict.fromkeys(pairs[native].foreign for native in written):
        group = sorted(grouped[name], key=lambda pair: pair.start)
        parts = tuple(pair for pair in group if pair.native in carrying)
        in_ = getattr(group[0].dims, group[0].module.in_)
        modules.append(
            _ForeignModule(name, group[0].foreign_out, in_, parts, len(parts) == len(group))
        )
    return modules


def _exact(
    adapter: TensorSource, config: AdapterConfig, modules: list[_ForeignModule]
) -> tuple[LazyTensors, dict[str, Any]]:
    """The tensors and the config's fields as PEFT has them."""
    tensors = _Tensors(adapter)
    ranks, alphas = {}, {}
    for module in modules:
        kinds = {(config.rank(p.native), config.alpha_for(p.native)) for p in module.parts}
        if not module.whole or len(kinds) > 1:
            raise ConfigError(
                f"{module.name}: is fused of several modules, so DoRA must be on all of them with "
                "the same rank and alpha to be written for PEFT; adapt the others too"
            )
        rank, alpha = kinds.pop()
        count = len(module.parts)
        ranks[module.name] = rank * count
        alphas[module.name] = alpha * (count**0.5 if config.use_rslora else count)
        tensors.add(module, rank * count, dict.fromkeys(module.parts, 1.0), MAGNITUDE)
    fields = {
        "r": config.r,
        "lora_alpha": _whole(config.alpha),
        "use_dora": True,
        "use_rslora": config.use_rslora,
        "rank_pattern": _pattern(ranks, config.r),
        "alpha_pattern": _pattern(alphas, config.alpha),
    }
    return tensors.lazy(), fields


def _portable(
    adapter: TensorSource, config: AdapterConfig, modules: list[_ForeignModule]
) -> tuple[LazyTensors, dict[str, Any]]:
    """The tensors with one rank and one scale, which all engines read."""
    rank = max(module.rank(config) for module in modules)
    # So that the scale of what needs no padding stays what it is.
    alpha = config.alpha * (rank // config.r) if rank % config.r == 0 else config.alpha
    tensors = _Tensors(adapter)
    for module in modules:
        factors = {
            part: _fold_factor(config.scale(part.native), alpha / rank) for part in module.parts
        }
        tensors.add(module, rank, factors)
    fields = {
        "r": rank,
        "lora_alpha": _whole(alpha),
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return tensors.lazy(), fields


def _whole(number: float) -> float:
    # Engines take alpha for a whole number, so it is written as one wherever it is.
    return int(number) if number == int(number) else number


def _pattern(values: Mapping[str, float], default: float) -> dict[str, float]:
    """PEFT's pattern for the modules that differ; by last name where all of that name agree."""
    by_last: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        by_last.setdefault(name.rsplit(".", 1)[-1], {})[name] = _whole(value)
    pattern: dict[str, float] = {}
    for last, named in by_last.items():
        if len(set(named.values())) == 1:
            named = {last: next(iter(named.values()))}
        pattern.update({name: value for name, value in named.items() if value != default})
    return pattern


class _Tensors:
    """Collects the tensors of foreign modules, to be computed when they are read.

    In a fused module, A is the parts' A stacked along the rank and B is block-diagonal, so each
    part gets just its own update.
    """

    def __init__(self, adapter: TensorSource) -> None:
        self._adapter = adapter
        self._metas: dict[str, TensorMeta] = {}
        self._compute: dict[str, Callable[[], Tensor]] = {}

    def add(
        self,
        module: _ForeignModule,
        rank: int,
        factors: Mapping[ModulePair, float],
        *others: Parameter,
    ) -> None:
        """Adds A and B, padded with zeros to a rank, and other parameters.

        Args:
            module: the module; all zeros if none of its parts carries an adapter.
            rank: of the tensors that are written.
            factors: what each part's B is multiplied with.
            others: further parameters of each part.
        """
        sizes = {"out": module.out, "in": module.in_, "rank": rank}
        for parameter in (LORA_A, LORA_B, *others):
            dtype = self._dtype(module, parameter)
            if parameter is LORA_B and not all(map(_is_exact, factors.values())):
                # Products that the adapter's own dtype would round.
                dtype = torch.promote_types(dtype, torch.float32)
            meta = TensorMeta(tuple(sizes[axis] for axis in parameter.axes), dtype)
            name = f"{_PREFIX}{module.name}.{parameter.foreign}"
            self._metas[name] = meta
            own = factors if parameter is LORA_B else dict.fromkeys(module.parts, 1.0)
            self._compute[name] = partial(_assemble, self._adapter, module, parameter, own, meta)

    def lazy(self) -> LazyTensors:
        """All that was added."""
        return LazyTensors(self._metas, self._compute)

    def _dtype(self, module: _ForeignModule, parameter: Parameter) -> torch.dtype:
        names = [f"{part.native}.{parameter.native}" for part in module.parts]
        dtypes = [self._adapter.metas[name].dtype for name in names]
        if not dtypes:
            dtypes = [next(iter(self._adapter.metas.values())).dtype]
        return reduce(torch.promote_types, dtypes)


def _assemble(
    adapter: TensorSource,
    module: _ForeignModule,
    parameter: Parameter,
    factors: Mapping[ModulePair, float],
    meta: TensorMeta,
) -> Tensor:
    whole: Tensor | None = None
    rank_start = 0
    for part in module.parts:
        tensor = adapter.read(f"{part.native}.{parameter.native}").to(meta.dtype)
        if factors[part] != 1.0:
            tensor = tensor * factors[part]
        tensor = part.to_foreign(tensor, parameter)
        if tuple(tensor.shape) == meta.shape:
            return tensor
        if whole is None:
            whole = tensor.new_zeros(meta.shape)
        starts = {"out": part.start, "in": 0, "rank": rank_start}
        place = whole
        for dim, axis in enumerate(parameter.axes):
            place = place.narrow(dim, starts[axis], tensor.shape[dim])
            if axis == "rank":
                rank_start += tensor.shape[dim]
        place.copy_(tensor)
    return torch.zeros(meta.shape, dtype=meta.dtype) if whole is None else whole


def _fold_factor(scale: float, written_scale: float) -> float:
    """By what B grows so that the scale may be written plainly; a clean power of two if it is."""
    factor = scale / written_scale
    power = 2.0 ** round(math.log2(factor))
    return power if math.isclose(factor, power, rel_tol=1e-12) else factor


def _is_exact(factor: float) -> bool:
    """Whether multiplying with the factor only changes exponents."""
    return math.frexp(factor)[0] == 0.5


def _with_fused(
    modules: list[str], pairs: Mapping[str, ModulePair], groups: tuple[tuple[str, ...], ...]
) -> list[str]:
    """The modules and all that engines fuse with them, in the order of the model."""
    wanted = set(modules)
    for module in modules:
        parent, _, last = module.rpartition(".")
        for group in groups:
            if last in group:
                wanted.update(f"{parent}.{other}" for other in group)
    return [name for name in pairs if name in wanted]


def _target_modules(pairs: Mapping[str, ModulePair], written: set[str]) -> list[str]:
    """Last names where they mean all modules of that name, as engines expect; else full names."""
    last_names: dict[str, list[str]] = {}
    for name in dict.fromkeys(pair.foreign for pair in pairs.values()):
        last_names.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    targets = []
    for last, modules in last_names.items():
        carrying = [module for module in modules if module in written]
        targets.extend([last] if carrying == modules else carrying)
    return targets
