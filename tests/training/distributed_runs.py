"""Runs of the distributed recipes in processes that are there already, which start quickly."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.cli.main import main
from checkpointing.training.config import load_config
from recipes import full_finetune_distributed, lora_finetune_distributed
from tests.sharded_worker import Job
from tests.training.runs import recipe_config

RECIPES = {"lora": lora_finetune_distributed, "full": full_finetune_distributed}


class Team:
    """Processes that train together, and are not told anything by their terminal.

    Args:
        count: number of processes.
        directory: for what they need.
    """

    def __init__(self, count: int, directory: Path) -> None:
        self._job = Job(count, directory)
        self._job.run(_leave_group)

    def run(self, kind: str, base: Path, out: Path, *overrides: str) -> list[Any]:
        """Runs a recipe in all processes; what each raised, or exited with; ``None`` if neither."""
        recipe_config(kind, base, out)
        arguments = (str(out / "recipe.yaml"), overrides, len(self._job), _free_port())
        return self._job.run(train, list(range(len(self._job))), kind=kind, arguments=arguments)

    def tune(self, *arguments: str) -> list[Any]:
        """Runs a `tune` command in all processes; the exit codes."""
        count = len(self._job)
        return self._job.run(tune, list(range(count)), place=(count, _free_port(), arguments))

    def __len__(self) -> int:
        return len(self._job)

    def stop(self) -> None:
        """Ends the processes."""
        self._job.stop()


def train(rank: int, kind: str, arguments: tuple[str, tuple[str, ...], int, int]) -> Any:
    """Runs a recipe as torch's launcher would have it run."""
    file, overrides, count, port = arguments
    cfg = load_config(file, overrides, known_keys=RECIPES[kind].CONFIG_KEYS)
    with _launched(rank, count, port):
        try:
            return RECIPES[kind].main(cfg)
        except SystemExit as exit:
            return exit.code


def tune(rank: int, place: tuple[int, int, tuple[str, ...]]) -> int:
    """Runs a command as torch's launcher would have it run."""
    count, port, arguments = place
    with _launched(rank, count, port):
        return main(arguments)


@contextmanager
def _launched(rank: int, count: int, port: int) -> Iterator[None]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), **place}
    torch.manual_seed(99 + rank)
    try:
        yield
    finally:
        if dist.is_initialized():
            _leave_group()


def _leave_group() -> None:
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
