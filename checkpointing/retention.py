"""Which checkpoints of a run are kept."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import ConfigError
from checkpointing.resume import SavedCheckpoint, saved_checkpoints
from checkpointing.storage.commit import remove_directory

logger = logging.getLogger(__name__)

METRICS_KEY = "metrics"


@dataclass(frozen=True)
class Retention:
    """Keeps a checkpoint for any one of the reasons that are given, and removes the others.

    The one that was just saved is always kept.

    Attributes:
        last: the newest so many.
        every_n_steps: those whose number of optimizer steps is a multiple of it.
        best: so many with the best metric; of equal ones the newest. One that does not tell the
            metric cannot be judged, and is kept.
        metric: its name among the ``metrics`` of ``save_checkpoint``. The recipes give ``loss``,
            that of the last step, ``grad_norm``, ``lr`` and ``tokens_per_second``.
        mode: ``min`` or ``max``: which is best.

    Raises:
        ConfigError: if nothing would be kept, or a number is not possible.
    """

    last: int | None = None
    every_n_steps: int | None = None
    best: int | None = None
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("last", "every_n_steps", "best")}
        problems = [
            f"{name}={number}: must be a whole number of at least 1, or null"
            for name, number in given.items()
            if number is not None and (type(number) is not int or number < 1)
        ]
        if all(number is None for number in given.values()):
            problems.append("give last, every_n_steps or best, or leave retention out to keep all")
        if self.mode not in ("min", "max"):
            problems.append(f"mode={self.mode}: there are max, min")
        if problems:
            raise ConfigError(f"retention: {'; '.join(problems)}")

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> set[Path]:
        """Directories of those to keep.

        Args:
            checkpoints: of one run, the newest last.
        """
        kept = [] if self.last is None else list(checkpoints[-self.last :])
        if self.every_n_steps is not None:
            kept += [each for each in checkpoints if self._is_due(each, self.every_n_steps)]
        if self.best is not None:
            kept += self._best(checkpoints, self.best)
        return {checkpoint.directory for checkpoint in kept}

    @staticmethod
    def _is_due(checkpoint: SavedCheckpoint, every: int) -> bool:
        step = checkpoint.manifest.get("step")
        return step is not None and step % every == 0

    def _best(self, checkpoints: Sequence[SavedCheckpoint], number: int) -> list[SavedCheckpoint]:
        unknown, judged = [], []
        for age, checkpoint in enumerate(checkpoints):
            value = _metric(checkpoint, self.metric)
            if value is None:
                unknown.append(checkpoint)
            else:
                judged.append((-value if self.mode == "max" else value, -age, checkpoint))
        if unknown:
            logger.warning(
                "retention: %s cannot be judged and is kept: it does not tell %r; save_checkpoint "
                "was given the metrics %s",
                ", ".join(checkpoint.directory.name for checkpoint in unknown),
                self.metric,
                ", ".join(sorted(_metrics(unknown[-1]))) or "none",
            )
        judged.sort(key=lambda entry: entry[:2])
        return unknown + [checkpoint for *_, checkpoint in judged[:number]]


def retention_of(keep_last_n: int | None, retention: Retention | None) -> Retention | None:
    """The policy that a checkpointer's arguments ask for; ``None``: keep all.

    Raises:
        ConfigError: if the arguments are wrong.
    """
    if retention is not None and not isinstance(retention, Retention):
        raise ConfigError(
            f"retention: {retention!r} is none; in a config write it with _component_: "
            "checkpointing.Retention"
        )
    if keep_last_n is None:
        return retention
    if retention is not None:
        raise ConfigError(
            f"keep_last_n_checkpoints={keep_last_n} and retention: give one of them; the former is "
            f"the same as retention.last={keep_last_n}"
        )
    if keep_last_n < 1:
        raise ConfigError(
            f"keep_last_n_checkpoints: {keep_last_n} would keep nothing; "
            "give 1 or more, or leave it out to keep all"
        )
    return Retention(last=keep_last_n)


def remove_old_checkpoints(
    output_dir: Path, retention: Retention, run_id: str, needed: Collection[Path]
) -> None:
    """Removes what need not be kept of a run's checkpoints, the oldest first.

    What another run saved, and what is no checkpoint or a damaged one, is never touched. Each goes
    at one instant, so that a crash leaves none in part.

    Args:
        output_dir: where the checkpoints lie.
        retention: which ones to keep.
        run_id: of the run.
        needed: directories that stay in any case: of the checkpoint that was just saved, and of
            one that is still to be read.
    """
    for checkpoint in removable(saved_checkpoints(output_dir), retention, run_id, needed):
        remove_directory(checkpoint.directory)


def removable(
    checkpoints: Sequence[SavedCheckpoint],
    retention: Retention,
    run_id: str,
    needed: Collection[Path],
) -> list[SavedCheckpoint]:
    """Those checkpoints of a run that need not be kept, the oldest first.

    Args:
        checkpoints: of any run, the newest last.
        retention: as for :func:`remove_old_checkpoints`, and so on.
        run_id: of the run.
        needed: directories that stay in any case.
    """
    own = [each for each in checkpoints if each.manifest["run_id"] == run_id]
    # Who goes back to an earlier checkpoint leaves later ones; the one just saved is the newest.
    own.sort(key=lambda checkpoint: checkpoint.directory in needed)
    kept = {*retention.kept(own), *needed}
    return [checkpoint for checkpoint in own if checkpoint.directory not in kept]


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are numbers, as JSON can hold them."""
    numbers = {name: float(value) for name, value in metrics.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _metrics(checkpoint: SavedCheckpoint) -> Mapping[str, object]:
    metrics = checkpoint.manifest.get(METRICS_KEY)
    return metrics if isinstance(metrics, Mapping) else {}


def _metric(checkpoint: SavedCheckpoint, name: str) -> float | None:
    value = _metrics(checkpoint).get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None  # type: ignore[arg-type, return-value]
