"""Folding an adapter into its base, and what rounding leaves of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpointing.adapter_checkpoint import AdapterCheckpoint, open_adapter
from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import MergedStateDict, adapter_modules, trained_tensors
from checkpointing.convert import ModelToWrite, plan_model
from checkpointing.formats.detect import find_model
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource
from checkpointing.storage.mirror import local, origin_of


@dataclass(frozen=True)
class Survival:
    """What rounding to a weight's dtype left of an adapter's update; sums over elements.

    With W the base weight, U the update before rounding and M the merged weight as stored.

    Attributes:
        updated: elements that U changes.
        changed: of these, the ones where M is not W.
        update: sum of U squared.
        kept: sum of (M - W) squared.
        lost: sum of (M - W - U) squared.
        weight: sum of W squared.
    """

    updated: int = 0
    changed: int = 0
    update: float = 0.0
    kept: float = 0.0
    lost: float = 0.0
    weight: float = 0.0

    def __add__(self, other: "Survival") -> "Survival":
        return Survival(
            self.updated + other.updated,
            self.changed + other.changed,
            self.update + other.update,
            self.kept + other.kept,
            self.lost + other.lost,
            self.weight + other.weight,
        )

    @property
    def changed_share(self) -> float:
        """Share of the updated elements whose stored value changed."""
        return self.changed / self.updated if self.updated else 1.0

    @property
    def kept_norm(self) -> float:
        """``‖M - W‖ / ‖U‖``, Frobenius; 1 if nothing is rounded away."""
        return (self.kept / self.update) ** 0.5 if self.update else 1.0

    @property
    def lost_norm(self) -> float:
        """``‖M - W - U‖ / ‖U‖``, Frobenius; 0 if nothing is rounded away."""
        return (self.lost / self.update) ** 0.5 if self.update else 0.0

    @property
    def relative_update(self) -> float:
        """``‖U‖ / ‖W‖``, Frobenius."""
        return (self.update / self.weight) ** 0.5 if self.weight else float("inf")


class _Widened:
    """A source in a dtype wide enough that the rounding of a merge shows against it."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.metas = {
            name: TensorMeta(meta.shape, _wide(meta.dtype)) for name, meta in source.metas.items()
        }

    def read(self, name: str) -> Tensor:
        return self._source.read(name).to(self.metas[name].dtype)


class _LastKept:
    """A source that need not compute a tensor anew which is read several times in a row."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.metas = source.metas
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self._source.read(name))
        return self._last[1]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else torch.float64


class MeasuredMerge(LazyTensors):
    """The merged weights of a model, which are measured when they are read.

    Attributes:
        survival: for every merged module that has been read, by native name.

    Args:
        base: native weights.
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.

    Raises:
        TensorMismatchError: if the adapter does not fit the base.
    """

    def __init__(self, base: TensorSource, adapter: TensorSource, config: AdapterConfig) -> None:
        self.survival: dict[str, Survival] = {}
        self._base = base
        self._merged = MergedStateDict(base, adapter, config)
        self._exact = MergedStateDict(_Widened(base), adapter, config)
        self.modules = adapter_modules(adapter.metas)
        compute = {name: partial(self._merged.read, name) for name in self._merged.metas}
        compute |= {
            kind.weight.native_name(module): partial(self._measure, module)
            for module, kind in self.modules.items()
        }
        super().__init__(self._merged.metas, compute)

    def _measure(self, module: str) -> Tensor:
        name = self.modules[module].weight.native_name(module)
        stored = self._merged.read(name)
        weight = self._base.read(name).to(_wide(stored.dtype))
        update = self._exact.read(name) - weight
        kept = stored.to(weight.dtype) - weight
        updated = update != 0
        self.survival[module] = Survival(
            updated=int(updated.sum()),
            changed=int((updated & (kept != 0)).sum()),
            update=_squares(update),
            kept=_squares(kept),
            lost=_squares(kept - update),
            weight=_squares(weight),
        )
        return stored


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def by_kind(survival: Mapping[str, Survival]) -> dict[str, tuple[int, Survival]]:
    """Number of modules and their sum, by the last part of the modules' names."""
    kinds: dict[str, tuple[int, Survival]] = {}
    for module, one in survival.items():
        count, total = kinds.get(module.rsplit(".", 1)[-1], (0, Survival()))
        kinds[module.rsplit(".", 1)[-1]] = (count + 1, total + one)
    return kinds


@dataclass(frozen=True)
class Merge:
    """A planned merge.

    Attributes:
        plan: the model to write.
        merged: its native weights, which measure themselves while they are written.
        adapter: the adapter.
    """

    plan: ModelToWrite
    merged: MeasuredMerge
    adapter: AdapterCheckpoint


def plan_merge(
    base: str | Path,
    adapter: str | Path,
    to: str | None = None,
    model_type: str | None = None,
    max_shard_size: str | int = "5GB",
    original_base: bool = False,
) -> Merge:
    """Plans a base with an adapter folded in: in fp32, rounded once to the base's dtype.

    The base of a QLoRA run is rounded to NF4 as in the run before, and all weights have the run's
    dtype, so that the model is the one that was trained.

    Args:
        base: directory of a model in any format, or its URL.
        adapter: a checkpoint of an adapter run, or a PEFT adapter directory; or its URL.
        to: format to write, by default the base's.
        model_type: needed where no config file names the family.
        max_shard_size: largest file.
        original_base: never round the base to NF4.

    Raises:
        CheckpointNotFoundError: if there is no base or no adapter.
        ConfigError: if the adapter was trained on another base.
        TensorMismatchError: lists every tensor of the adapter that does not fit the base.
    """
    base, adapter = local(base), local(adapter)
    found = find_model(base)
    model = found.open(model_type)
    opened = open_adapter(adapter, model)
    opened.check_base(model.native, base)
    rounding = None if original_base else opened.base_rounding
    weights = model.native if rounding is None else _LastKept(rounding.rounded(model.native))
    merged = MeasuredMerge(weights, opened.tensors, opened.config)
    merged_model = replace(model, native=merged)
    plan = plan_model(found, merged_model, to or found.format.name, max_shard_size)
    facts = {**plan.facts, "merged_adapter": origin_of(adapter)}
    notes = plan.notes
    if rounding is not None:
        notes += (
            f"the adapter was trained on the base rounded to NF4 in {rounding.to_state()['dtype']};"
            " it is merged into the base so rounded (--original-base: as it is)",
        )
    if whole := trained_tensors(opened.tensors.metas):
        last_names = ", ".join(dict.fromkeys(module.rsplit(".", 1)[-1] for module in whole))
        notes += (f"modules that were trained whole take the place of the base's: {last_names}",)
    return Merge(replace(plan, facts=facts, notes=notes), merged, opened)
