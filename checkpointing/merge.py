"""Folding an adapter into its base, and what rounding leaves of it."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapter_checkpoint import AdapterCheckpoint, open_adapter
from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import (
    MergedStateDict,
    merged_weight,
    trained_tensors,
    unrounded_merge,
)
from checkpointing.convert import ModelToWrite, plan_model
from checkpointing.formats.detect import find_model
from checkpointing.mapping.model_parallel import ONE_RANK, Parallel
from checkpointing.mapping.tensors import TensorSource
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


class MeasuredMerge(MergedStateDict):
    """The merged weights of a model, which are measured when they are read.

    Args:
        base: native weights.
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        sampled: of a large weight, only one row in so many is measured.

    Raises:
        TensorMismatchError: if the adapter does not fit the base.
    """

    def __init__(
        self, base: TensorSource, adapter: TensorSource, config: AdapterConfig, sampled: int = 1
    ) -> None:
        # Several threads may read; appending is one step, which adding to a sum is not.
        self._measured: list[tuple[str, Survival]] = []
        self._taken = 0
        self._sampled = sampled
        super().__init__(base, adapter, config)

    @property
    def survival(self) -> dict[str, Survival]:
        """What is left of the update of every merged module that has been read, by native name."""
        return _sums(self._measured)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those of the merged weights that have been read."""
        return {self.metas[self._weight_of(module)].dtype for module in self.survival}

    def _weight_of(self, module: str) -> str:
        # The weight of experts is called as their module is.
        return module if module in self.metas else f"{module}.weight"

    def take(self) -> Any:
        """What was measured since this was last called, for JSON."""
        new = self._measured[self._taken :]
        self._taken += len(new)
        return {module: astuple(one) for module, one in _sums(new).items()}

    def restart(self, measured: Sequence[Any]) -> None:
        """Forgets all but what :meth:`take` once gave.

        Raises:
            ValueError: if it never gave that; nothing is known then.
        """
        self._measured, self._taken = [], 0
        found = [one for each in measured for one in _read(each)]
        if not all(self._weight_of(module) in self.metas for module, _ in found):
            raise ValueError("measured modules that the model has not")
        self._measured, self._taken = found, len(found)

    def _merge(
        self, module: str, weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor | None
    ) -> Tensor:
        scale = self._config.scale(module)
        wide = _wide(weight.dtype)
        exact = unrounded_merge(weight, lora_a, lora_b, scale, magnitude, wide)
        if wide == torch.float32:
            stored = exact.to(weight.dtype)
        else:
            stored = merged_weight(weight, lora_a, lora_b, scale, magnitude)
        # Of all of it: what is given may be a few rows of a large weight.
        many = self.metas[self._weight_of(module)].shape[-2] >= _MANY_ROWS
        rows = slice(None, None, self._sampled if many else 1)
        one = _survival(weight[..., rows, :], exact[..., rows, :], stored[..., rows, :])
        self._measured.append((module, one))
        return stored


# A row has thousands of elements, so that these tell the shares of a model to three digits.
_SAMPLED, _MANY_ROWS = 32, 64


def _sums(measured: Sequence[tuple[str, Survival]]) -> dict[str, Survival]:
    sums: dict[str, Survival] = {}
    for module, one in measured:
        sums[module] = sums.get(module, Survival()) + one
    return sums


def _read(measured: Any) -> list[tuple[str, Survival]]:
    """What :meth:`MeasuredMerge.take` gave, after its way through JSON."""
    try:
        found = [(module, Survival(*numbers)) for module, numbers in measured.items()]
    except (AttributeError, TypeError) as error:
        raise ValueError("not what was measured of modules") from error
    if not all(isinstance(number, int | float) for _, one in found for number in astuple(one)):
        raise ValueError("not what was measured of modules")
    return found


def _survival(weight: Tensor, exact: Tensor, stored: Tensor) -> Survival:
    before = weight.to(exact.dtype)
    update = exact - before
    # Not in place: of fp64 weights this is what is stored, and not a copy of it.
    kept = stored.to(exact.dtype) - before
    updated, update_norm = int(torch.count_nonzero(update)), _squares(update)
    return Survival(
        updated=updated,
        changed=int(torch.count_nonzero(kept)),
        update=update_norm,
        kept=_squares(kept),
        lost=_squares(update.sub_(kept)),
        weight=_squares(before),
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Wide enough that the rounding of a merge shows against it."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


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
    parallel: Parallel = ONE_RANK,
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
        parallel: number of ranks, of Megatron's format.

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
    weights = model.native if rounding is None else rounding.rounded(model.native)
    merged = MeasuredMerge(weights, opened.tensors, opened.config, _SAMPLED)
    merged_model = replace(model, native=merged)
    to = to or found.format.name
    plan = plan_model(found, merged_model, to, max_shard_size, parallel)
    facts = {**plan.facts, "merged_adapter": origin_of(adapter)}
    computed_with = {
        "adapter": opened.config.to_state(),
        "base_rounding": None if rounding is None else rounding.to_state(),
    }
    notes = plan.notes
    if rounding is not None:
        notes += (
            f"the adapter was trained on the base rounded to NF4 in {rounding.to_state()['dtype']};"
            " it is merged into the base so rounded (--original-base: as it is)",
        )
    if whole := trained_tensors(opened.tensors.metas):
        last_names = ", ".join(dict.fromkeys(module.rsplit(".", 1)[-1] for module in whole))
        notes += (f"modules that were trained whole take the place of the base's: {last_names}",)
    plan = replace(
        plan,
        inputs=(*plan.inputs, *opened.files),
        computed_with=computed_with,
        measure=merged,
        facts=facts,
        notes=notes,
    )
    return Merge(plan, merged, opened)
