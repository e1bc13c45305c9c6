"""Saving with safetensors, and with torch's distributed checkpoints."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.benchmarks.durable import cleared, files_of, sync_tree


@cache
def _weights(base: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in files_of(Path(base)):
        if path.suffix == ".safetensors":
            weights |= {name: tensor.clone() for name, tensor in load_file(path).items()}
    return weights


def save_safetensors(base: str, out: str) -> Callable[[], Any]:
    """Saves one file, under the names that the tensors have already."""
    weights, destination = _weights(base), cleared(Path(out))

    def run() -> None:
        destination.mkdir()
        save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
        sync_tree(destination)

    return run


def save_dcp(base: str, out: str) -> Callable[[], Any]:
    """Saves a distributed checkpoint of one process."""
    weights, destination = _weights(base), cleared(Path(out))

    def run() -> None:
        writer = dcp.FileSystemWriter(destination, sync_files=True, thread_count=2)
        dcp.save({"model": weights}, storage_writer=writer, no_dist=True)
        sync_tree(destination)

    return run
