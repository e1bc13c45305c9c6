"""Where the numbers of a run go. All loggers have the methods of :class:`MetricLogger`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from checkpointing.errors import ConfigError
from checkpointing.training.log_directory import LogDirectory


class MetricLogger(Protocol):
    """Takes the numbers of optimizer steps."""

    def log(self, name: str, value: float, step: int) -> None:
        """Takes one number."""

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Takes the numbers of one step."""

    def close(self) -> None:
        """Makes sure that all is written."""


class DiskLogger:
    """Appends a JSON object per step to ``metrics.jsonl``.

    A run that goes on appends to the file. Steps that it repeats, because they came after the
    checkpoint that it went on from, are there twice; the later line counts.

    Args:
        log_dir: is made if need be. The logs of a URL are uploaded when the run ends.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self._directory = LogDirectory(log_dir)
        self.path = self._directory.file("metrics.jsonl")
        torn = self.path.is_file() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = self.path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")  # a power loss may cut the last line short

    def log(self, name: str, value: float, step: int) -> None:
        """Writes a line with one number."""
        self.log_dict({name: value}, step)

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Writes a line with the numbers of one step; floats keep all their digits."""
        self._file.write(json.dumps({"step": step, **payload}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        self._directory.close()


class StdoutLogger:
    """Prints a line per step."""

    def log(self, name: str, value: float, step: int) -> None:
        """Prints one number."""
        self.log_dict({name: value}, step)

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Prints the numbers of one step."""
        numbers = " ".join(f"{name}={value:.6g}" for name, value in payload.items())
        print(f"step {step}: {numbers}")

    def close(self) -> None:
        """Flushes the output."""
        sys.stdout.flush()


class NullLogger:
    """Takes the numbers and keeps nothing: for the processes of a job beside the first one."""

    def log(self, name: str, value: float, step: int) -> None:
        """Does nothing."""

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class TensorBoardLogger:
    """Writes event files for TensorBoard; a run that goes on adds a file to those that are there.

    Args:
        log_dir: is made if need be. The logs of a URL are uploaded when the run ends.

    Raises:
        ConfigError: if the package ``tensorboard`` is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "TensorBoardLogger needs the package tensorboard: `pip install tensorboard`, "
                "or set metric_logger._component_=checkpointing.training.DiskLogger"
            ) from error
        self._directory = LogDirectory(log_dir)
        self._writer: Any = SummaryWriter(log_dir=str(self._directory.path))

    def log(self, name: str, value: float, step: int) -> None:
        """Writes one number."""
        self._writer.add_scalar(name, value, global_step=step, new_style=True)

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Writes the numbers of one step."""
        for name, value in payload.items():
            self.log(name, value, step)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._writer.close()
        self._directory.close()


class WandBLogger:
    """Sends the numbers to Weights & Biases.

    Args:
        project: name of the project there.
        log_dir: where wandb keeps its files.
        **options: for ``wandb.init``; with ``id=… resume=allow`` a run that goes on is one run.

    Raises:
        ConfigError: if the package ``wandb`` is not installed.
    """

    def __init__(
        self, project: str = "tunepoint", log_dir: str | Path | None = None, **options: Any
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "WandBLogger needs the package wandb: `pip install wandb` and `wandb login`, "
                "or set metric_logger._component_=checkpointing.training.DiskLogger"
            ) from error
        if log_dir is not None:
            log_dir = LogDirectory(log_dir).path
        self._run: Any = wandb.init(project=project, dir=log_dir, **options)

    def log(self, name: str, value: float, step: int) -> None:
        """Sends one number."""
        self.log_dict({name: value}, step)

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Sends the numbers of one step."""
        self._run.log(dict(payload), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
