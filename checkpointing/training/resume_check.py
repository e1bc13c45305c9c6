"""What a resumed run does otherwise than before: shown, and refused where it would be another run.

Whether the data is the same is told by the rows themselves and not by the words of the config: a
directory may move, and a file of the same name may hold something else. So it is for the base of
an adapter, whose fingerprint was compared when it was loaded.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig

from checkpointing.errors import ConfigError
from checkpointing.printable import printable
from checkpointing.save_plan import ADAPTER_KEY, RUN_KEY
from checkpointing.training.row_loader import RowLoader
from checkpointing.training.run_record import SETTINGS, WORLD_SIZE, run_record


class _Effect(Enum):
    """What it means for a run that a key changes."""

    NONE = ""
    FROM_HERE = " (from here on)"
    OTHER_RUN = " (makes it another run)"


# The longest key that fits decides; of all other keys the effect is none.
_EFFECTS = {
    "model": _Effect.OTHER_RUN,
    "model.lora_dropout": _Effect.FROM_HERE,
    "dtype": _Effect.OTHER_RUN,
    "checkpointer._component_": _Effect.OTHER_RUN,
    "checkpointer.model_type": _Effect.OTHER_RUN,
    "checkpointer.checkpoint_dir": _Effect.OTHER_RUN,
    "checkpointer.checkpoint_files": _Effect.OTHER_RUN,
    "optimizer": _Effect.FROM_HERE,
    "optimizer._component_": _Effect.OTHER_RUN,
    "lr_scheduler": _Effect.FROM_HERE,
    "clip_grad_norm": _Effect.FROM_HERE,
    "max_steps_per_epoch": _Effect.FROM_HERE,
    "gradient_accumulation_steps": _Effect.FROM_HERE,
    "engine": _Effect.FROM_HERE,
    "sampling": _Effect.FROM_HERE,
    "group_size": _Effect.FROM_HERE,
    "reward": _Effect.FROM_HERE,
    "objective": _Effect.FROM_HERE,
    "num_policy_updates": _Effect.FROM_HERE,
    "sync": _Effect.FROM_HERE,
    "sync_every": _Effect.FROM_HERE,
    WORLD_SIZE: _Effect.FROM_HERE,
}
_BASE_DIR = "checkpointer.checkpoint_dir"
_ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class _Change:
    key: str
    old: Any
    new: Any
    effect: _Effect

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.old)} -> {_text(self.new)}"


def check_resume(config: DictConfig, state: Mapping[str, Any], batches: RowLoader) -> None:
    """Shows what differs from the run that is resumed; refuses what would make it another run.

    Such are other rows, another order or batch size (of all processes together), another base,
    dtype, optimizer or adapter. ``resume_override: true`` in the config lets them pass.

    Args:
        config: of the recipe.
        state: as a checkpointer loaded it. One that does not say what the run was, such as
            torchtune's, is compared as far as it does.
        batches: of this run.

    Raises:
        ConfigError: lists all changes that would make it another run.
    """
    changes = [*_changed_settings(config, state), *_changed_data(config, state, batches)]
    if not changes:
        return
    refused = [change for change in changes if change.effect is _Effect.OTHER_RUN]
    if refused and not config.get("resume_override", False):
        lines = "\n".join(f"  - {change}" for change in refused)
        raise ConfigError(
            f"the run that is resumed was another one, by what the config says now:\n{lines}\n"
            "Set them back, or start a new run in another output_dir; resume_override=True goes on "
            "with what is new, as far as the saved state fits it"
        )
    print("changed since the checkpoint was saved:")
    for change in changes:
        print(f"  {printable(str(change))}{change.effect.value}")


def _changed_settings(config: DictConfig, state: Mapping[str, Any]) -> Iterator[_Change]:
    run = state.get(RUN_KEY)
    if not isinstance(run, Mapping):
        return
    old, new = _flat(run), _flat(run_record(config))
    for key in dict.fromkeys([*new, *old]):
        was, now = old.get(key), new.get(key)
        if not _same(key, was, now):
            yield _Change(key, was, now, _effect(key, was, now, state))


def _changed_data(
    config: DictConfig, state: Mapping[str, Any], batches: RowLoader
) -> Iterator[_Change]:
    place = state.get("dataloader")
    if place is not None:
        for what, (was, now) in batches.changed_since(place).items():
            yield _Change(what, was, now, _Effect.OTHER_RUN)
    was, now = state.get(_ACCUMULATION), config.get(_ACCUMULATION, 1)
    if state.get("steps_in_epoch") and was != now:
        yield _Change(f"{_ACCUMULATION} within an epoch", was, now, _Effect.OTHER_RUN)


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by their dotted keys, and the number of processes."""
    flat = {WORLD_SIZE: run.get(WORLD_SIZE)}

    def add(node: Any, path: str) -> None:
        if isinstance(node, Mapping) and (node or not path):
            for key, value in node.items():
                add(value, f"{path}.{key}" if path else str(key))
        else:
            flat[path] = node

    add(run.get(SETTINGS, {}), "")
    # The data says itself whether they have changed.
    for key in ("batch_size", "shuffle", "seed"):
        flat.pop(key, None)
    return flat


def _same(key: str, was: Any, now: Any) -> bool:
    if was == now:
        return True
    if key == _BASE_DIR and isinstance(was, str) and isinstance(now, str):
        return os.path.realpath(was) == os.path.realpath(now)
    # Of lists of modules the order means nothing.
    in_order = key.startswith("model.") and isinstance(was, list) and isinstance(now, list)
    return in_order and sorted(map(str, was)) == sorted(map(str, now))


def _effect(key: str, was: Any, now: Any, state: Mapping[str, Any]) -> _Effect:
    if key == _BASE_DIR and ADAPTER_KEY in state:
        return _Effect.NONE
    if key.startswith("model.") and None in (was, now):
        # It may be the default; what the adapter is, is compared exactly when the model is built.
        return _Effect.FROM_HERE
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_EFFECTS[each] for each in prefixes if each in _EFFECTS), _Effect.NONE)


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
