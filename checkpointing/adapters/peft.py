"""PEFT's adapter directory: ``adapter_model.safetensors`` and ``adapter_config.json``.

Key names and config fields as PEFT reads them (https://github.com/huggingface/peft,
``docs/source/developer_guides/checkpoint.md``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import adapter_modules, check_adapter
from checkpointing.adapters.peft_experts import (
    PackedParameter,
    bare_parameters,
    check_packable,
    experts_modules,
    left_out_by_peft,
    pack,
    target_parameters,
)
from checkpointing.adapters.peft_whole import CLASSIFIER, CLASSIFIER_HEAD, whole_modules
from checkpointing.errors import ConfigError
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import BIAS, AdapterKind, Parameter
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource, is_sharded
from checkpointing.nearest import hint

PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_WEIGHTS_TORCH = "adapter_model.bin"
PEFT_CONFIG = "adapter_config.json"
ADAPTER_FORMS = ("portable", "exact")
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter as PEFT stores it.

    Attributes:
        tensors: by PEFT's names.
        config: content of ``adapter_config.json``.
        notes: what its user should know, one line each.
    """

    tensors: TensorSource
    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def check_form(form: str) -> None:
    """Checks the name of a form that adapters are written in.

    Raises:
        ConfigError: if there is none of that name.
    """
    if form not in ADAPTER_FORMS:
        raise ConfigError(
            f"adapter_form: {form!r} is unknown, {hint(form, ADAPTER_FORMS)}; give one of "
            f"{', '.join(ADAPTER_FORMS)}"
        )


def to_peft(
    adapter: TensorSource,
    config: AdapterConfig,
    layout: Layout,
    base_model: str,
    form: str = "portable",
    base: TensorSource | None = None,
) -> PeftAdapter:
    """A native adapter in PEFT's form.

    The portable form is for inference engines, which ignore most of PEFT's config: one rank, and
    one scale ``alpha / r``; what differs from it is folded into ``B``. Modules that engines compute
    as one are all named if one of them carries an adapter, the others with zeros. The exact form
    has the adapter's own ranks and alphas, as patterns where they differ, and just its modules.
    What no engine serves (DoRA, a bias of B, modules that are trained whole) is always written
    exactly.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        layout: the base's layout in the Hugging Face format.
        base_model: repository or directory of the base, for PEFT's config.
        form: ``"portable"`` or ``"exact"``.
        base: native weights of the base; needed for a classifier whose head is not trained.

    Raises:
        ConfigError: if the form is unknown, or PEFT has no form for the adapter.
        TensorMismatchError: if the adapter does not fit the base, or is not whole.
    """
    check_form(form)
    check_in_peft(layout)
    subject = "saving a PEFT adapter"
    check_adapter(adapter.metas, config, layout.native_shapes(), subject)
    pairs = [pair for pair in layout.pairs if pair.module.adapter is not None]
    carrying = set(adapter_modules(adapter.metas))
    whole = whole_modules(adapter, layout, subject, base)
    experts = carrying & {n for m in experts_modules(layout).values() for n in m.all_natives}
    peft_only = _peft_only(config, layout, carrying)
    if form == "exact" or peft_only:
        check_packable(layout, carrying, config.use_dora)
        packed = pack(adapter, config, layout, experts, PEFT_PREFIX)
        own = carrying - experts
        modules = _foreign_modules(adapter, pairs, own, own)
        bare = bare_parameters(layout, own)
        tensors, fields = _exact(adapter, config, modules, packed.parameters, bare)
        tensors = _joined(tensors, packed.tensors, "")
        parameters = [*packed.target_parameters, *target_parameters(bare.values(), layout)]
        modules = [module for module in modules if module.name not in bare]
        fields |= {"target_parameters": parameters} if parameters else {}
    else:
        written = _with_fused(carrying, pairs, layout.family.fused_in_engines)
        modules = _foreign_modules(adapter, pairs, carrying, written)
        tensors, fields = _portable(adapter, config, modules)
        peft_only = left_out_by_peft(layout, carrying)
    peft_config = {
        "peft_type": "LORA",
        "task_type": layout.family.task_type,
        "base_model_name_or_path": base_model,
        "target_modules": _target_modules(pairs, {module.name for module in modules}),
        # PEFT has no dropout for experts.
        "lora_dropout": 0.0 if experts else config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": whole.names or None,
        "lora_bias": config.lora_bias,
        "init_lora_weights": True,
        **fields,
        **({"ensure_weight_tying": True} if whole.tied else {}),
    }
    return PeftAdapter(_joined(tensors, whole.tensors, PEFT_PREFIX), peft_config, peft_only)


def check_in_peft(layout: Layout) -> None:
    """Checks that PEFT knows the modules of a family by the names that their tensors have.

    Raises:
        ConfigError: if not.
    """
    if not layout.family.in_peft:
        raise ConfigError(
            f"an adapter for {layout.family.name}: transformers names the modules of this model "
            "otherwise than its tensors, so PEFT's form of it is not known here; convert and train "
            "its weights without an adapter"
        )


def _peft_only(config: AdapterConfig, layout: Layout, carrying: set[str]) -> tuple[str, ...]:
    """What to say of an adapter that only PEFT reads; nothing if engines read it too."""
    # Engines do read the head of a classifier.
    heads = {CLASSIFIER_HEAD} if layout.family.task_type == CLASSIFIER else set()
    kinds = {
        "DoRA": config.use_dora,
        "a bias of B (lora_bias)": config.lora_bias,
        "experts that are stored together": any(
            module.is_swapped and carrying & set(module.all_natives)
            for module in experts_modules(layout).values()
        ),
        "modules that are trained whole (modules_to_save)": set(config.modules_to_save) - heads,
    }
    has = [kind for kind, is_so in kinds.items() if is_so]
    if not has:
        return ()
    shapes = layout.native_shapes()
    mergeable = not config.lora_bias or all(BIAS.native_name(m) in shapes for m in carrying)
    instead = (
        "for an engine use the merged model (`tune merge`, or merged/ in a checkpoint)"
        if mergeable
        else "nor could a merged model hold it, where modules have no bias"
    )
    return (
        f"the adapter has {' and '.join(has)}, which no inference engine serves: it is written for "
        f"PEFT alone; {instead}",
    )


def _joined(first: LazyTensors, second: LazyTensors, prefix: str) -> LazyTensors:
    """The tensors of both, those of the second under longer names."""
    metas = {**first.metas, **{prefix + name: meta for name, meta in second.metas.items()}}
    rows = {name: partial(first.rows, name) for name in first}
    rows |= {prefix + name: partial(second.rows, name) for name in second}
    return LazyTensors(metas, rows)


@dataclass(frozen=True)
class _ForeignModule:
    """A foreign module that is written, and the native ones that it is made of.

    Attributes:
        group: all native modules in it, in their order; more than one only if it is fused.
        parts: those of them that carry an adapter.
        shares_a: all parts have the same A, as those of an adapter that PEFT made, and it is
            written once.
    """

    group: tuple[ModulePair, ...]
    parts: tuple[ModulePair, ...]
    shares_a: bool

    @property
    def name(self) -> str:
        """Its name."""
        return self.group[0].foreign

    @property
    def kind(self) -> AdapterKind:
        """The kind of its adapter."""
        kind = self.group[0].module.adapter
        assert kind is not None
        return kind

    def rank(self, config: AdapterConfig) -> int:
        """Rank of its adapter: the ranks of its parts, stacked unless they share A."""
        ranks = [config.rank(part.native) for part in self.parts]
        return ranks[0] if self.shares_a else sum(ranks)


def _foreign_modules(
    adapter: TensorSource, pairs: Sequence[ModulePair], carrying: set[str], written: set[str]
) -> list[_ForeignModule]:
    grouped: dict[str, list[ModulePair]] = {}
    for pair in pairs:
        grouped.setdefault(pair.foreign, []).append(pair)
    modules = []
    for group in grouped.values():
        if any(pair.native in written for pair in group):
            group.sort(key=lambda pair: pair.start)
            parts = tuple(pair for pair in group if pair.native in carrying)
            modules.append(_ForeignModule(tuple(group), parts, _share_a(adapter, parts)))
    return modules


def _share_a(adapter: TensorSource, parts: Sequence[ModulePair]) -> bool:
    """Whether the parts, more than one, have the same A, bit for bit."""
    names = [p.module.adapter.a.native_name(p.native) for p in parts if p.module.adapter]
    if len(names) < 2 or len({adapter.metas[name] for name in names}) > 1:
        return False
    first = adapter.read(names[0])
    return all(torch.equal(adapter.read(name), first) for name in names[1:])


def _exact(
    adapter: TensorSource,
    config: AdapterConfig,
    modules: list[_ForeignModule],
    packed: Sequence[PackedParameter],
    bare: Mapping[str, str],
) -> tuple[LazyTensors, dict[str, Any]]:
    """The tensors of modules, and the config's fields, as PEFT has them.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        modules: what is written.
        packed: parameters that are adapted beside the modules.
        bare: what patterns call the modules that transformers holds as parameters.
    """
    tensors = _Tensors(adapter, config)
    ranks = {one.name: one.rank for one in packed}
    alphas = {
        one.name: one.scale * (one.rank**0.5 if config.use_rslora else one.rank) for one in packed
    }
    if config.use_dora:
        _check_all_parts(modules)
    for module in modules:
        name = bare.get(module.name, module.name)
        ranks[name] = rank = module.rank(config)
        alphas[name], scale = _shared_alpha(module, config)
        factors = {
            part.native: _fold_factor(config.scale(part.native), scale) for part in module.parts
        }
        tensors.add(module, rank, factors)
    fields = {
        "r": config.r,
        "lora_alpha": _whole(config.alpha),
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
        "rank_pattern": _pattern(ranks, config.r),
        "alpha_pattern": _pattern(alphas, config.alpha),
    }
    return tensors.lazy(), fields


def _shared_alpha(module: _ForeignModule, config: AdapterConfig) -> tuple[float, float]:
    """The alpha of a module for which its first part keeps its scale, and that scale."""
    first = module.parts[0].native
    growth = module.rank(config) / config.rank(first)
    alpha = config.alpha_for(first) * (growth**0.5 if config.use_rslora else growth)
    return alpha, config.scale(first)


def _portable(
    adapter: TensorSource, config: AdapterConfig, modules: list[_ForeignModule]
) -> tuple[LazyTensors, dict[str, Any]]:
    """The tensors with one rank and one scale, which all engines read."""
    rank = max(module.rank(config) for module in modules)
    # So that the scale of what needs no padding stays what it is.
    alpha = config.alpha * (rank // config.r) if rank % config.r == 0 else config.alpha
    tensors = _Tensors(adapter, config)
    for module in modules:
        factors = {
            part.native: _fold_factor(config.scale(part.native), alpha / rank)
            for part in module.parts
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


def with_one_scale(
    adapter: TensorSource, config: AdapterConfig, layout: Layout
) -> tuple[LazyTensors, dict[str, Any]]:
    """The tensors of an adapter, of any kind, with one rank and one scale for all modules.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        layout: the base's layout in a foreign format.

    Returns:
        Tensors by PEFT's names of the foreign modules that carry an adapter, and the fields of
        PEFT's config that tell their rank and scale.

    Raises:
        ConfigError: if DoRA is only on some parts of a fused module.
    """
    pairs = [pair for pair in layout.pairs if pair.module.adapter is not None]
    carrying = set(adapter_modules(adapter.metas))
    modules = _foreign_modules(adapter, pairs, carrying, carrying)
    if config.use_dora:
        _check_all_parts(modules)
    return _portable(adapter, config, modules)


def _check_all_parts(modules: Sequence[_ForeignModule]) -> None:
    """Checks that no part of a fused module lacks the magnitudes of the others."""
    for module in modules:
        if module.parts != module.group:
            raise ConfigError(
                f"{module.name}: is fused of several modules, so DoRA must be on all of them to be "
                "written; adapt the others too"
            )


def _whole(number: float) -> float:
    # Engines take alpha for a whole number, so it is written as one wherever it is.
    return int(number) if number == int(number) else number


def _pattern(values: Mapping[str, float], default: float) -> dict[str, float]:
    """PEFT's pattern for what differs; by last name where all of that name agree."""
    by_last: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        # A module that is a parameter for PEFT is called by that, as in gate.weight.
        last = ".".join(name.split(".")[-2 if name.endswith(".weight") else -1 :])
        by_last.setdefault(last, {})[name] = _whole(value)
    pattern: dict[str, float] = {}
    for last, named in by_last.items():
        if len(set(named.values())) == 1:
            named = {last: next(iter(named.values()))}
        pattern.update({name: value for name, value in named.items() if value != default})
    return pattern


class _Tensors:
    """Collects the tensors of foreign modules, to be computed when they are read.

    In a fused module, A is the parts' A stacked along the rank and B is block-diagonal, so each
    part gets just its own update. Where the parts share A, it is that, and B is the parts' B one
    after the other.
    """

    def __init__(self, adapter: TensorSource, config: AdapterConfig) -> None:
        self._adapter = adapter
        self._config = config
        self._metas: dict[str, TensorMeta] = {}
        self._compute: dict[str, Callable[[], Tensor]] = {}

    def add(self, module: _ForeignModule, rank: int, factors: Mapping[str, float]) -> None:
        """Adds A and B, padded with zeros to a rank, and what else the adapter has.

        Args:
            module: the module; all zeros if none of its parts carries an adapter.
            rank: of the tensors that are written.
            factors: what each part's B, and its bias, is multiplied with, by its native name.
        """
        kind = module.kind
        for parameter in self._config.parameters(kind):
            is_scaled = parameter in (kind.b, kind.bias)
            own = factors if is_scaled else {part.native: 1.0 for part in module.parts}
            dtype = self._dtype(module, parameter)
            if not all(map(_is_exact, own.values())):
                # Products that the adapter's own dtype would round.
                dtype = torch.promote_types(dtype, torch.float32)
            meta = TensorMeta(module.group[0].foreign_shape(parameter, rank), dtype)
            name = PEFT_PREFIX + parameter.foreign_name(module.name)
            self._metas[name] = meta
            self._compute[name] = partial(_assemble, self._adapter, module, parameter, own, meta)

    def lazy(self) -> LazyTensors:
        """All that was added."""
        gathers = is_sharded(self._adapter)
        return LazyTensors.of_whole(self._metas, self._compute, gathers)

    def _dtype(self, module: _ForeignModule, parameter: Parameter) -> torch.dtype:
        names = [parameter.native_name(part.native) for part in module.parts]
        dtypes = [self._adapter.metas[name].dtype for name in names]
        if not dtypes:
            dtypes = [next(iter(self._adapter.metas.values())).dtype]
        return reduce(torch.promote_types, dtypes)


def _assemble(
    adapter: TensorSource,
    module: _ForeignModule,
    parameter: Parameter,
    factors: Mapping[str, float],
    meta: TensorMeta,
) -> Tensor:
    whole: Tensor | None = None
    rank_start = 0
    for part in module.parts:
        tensor = adapter.read(parameter.native_name(part.native))
        tensor = part.slice_of(tensor, parameter).to(meta.dtype)
        if factors[part.native] != 1.0:
            tensor = tensor * factors[part.native]
        tensor = part.to_foreign(tensor, parameter)
        if tuple(tensor.shape) == meta.shape:
            return tensor
        if whole is None:
            whole = tensor.new_zeros(meta.shape)
        place = whole
        for dim, axis in enumerate(parameter.foreign_axes):
            if axis == "rank":
                place = place.narrow(dim, rank_start, tensor.shape[dim])
                rank_start += 0 if module.shares_a else tensor.shape[dim]
        part.put_part(tensor, place, parameter)
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
    carrying: set[str], pairs: Sequence[ModulePair], groups: tuple[tuple[str, ...], ...]
) -> set[str]:
    """The modules and all that engines fuse with them."""
    wanted = set(carrying)
    for module in carrying:
        parent, _, last = module.rpartition(".")
        for group in groups:
            if last in group:
                wanted.update(f"{parent}.{other}" for other in group)
    return wanted & {pair.native for pair in pairs}


def _target_modules(pairs: Sequence[ModulePair], written: set[str]) -> list[str]:
    """Last names where they mean all modules of that name, as engines expect; else full names."""
    last_names: dict[str, list[str]] = {}
    for name in dict.fromkeys(pair.foreign for pair in pairs):
        last_names.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    targets = []
    for last, modules in last_names.items():
        carrying = [module for module in modules if module in written]
        targets.extend([last] if carrying == modules else carrying)
    return targets
