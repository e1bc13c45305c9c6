"""State of the random number generators, as plain values and tensors."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def set_seed(seed: int) -> None:
    """Seeds torch (all devices), Python, and numpy if it is in use."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """States of torch, CUDA if it is in use, Python, and numpy if it is in use.

    The values load with ``torch.load(weights_only=True)``.

    Args:
        device: the only one whose state counts, as the others are other processes'; ``None``: all.
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
    }
    if torch.cuda.is_initialized():
        if device is not None and device.type == "cuda":
            state["cuda"] = [torch.cuda.get_rng_state(device)]
        else:
            state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def set_seed_of_share(seed: int, share: int) -> None:
    """Seeds a process that trains on a share of the rows so that it draws numbers of its own.

    The first share goes on with the numbers that it has, as a process that trains alone.

    Args:
        seed: of the run.
        share: number of the share.
    """
    if share > 0:
        set_seed(seed + share)


def set_rng_state(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restores what :func:`rng_state` gave, as far as it is in use here."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    saved = [each.cpu() for each in state.get("cuda", ())]
    if device is not None and device.type == "cuda" and len(saved) == 1:
        torch.cuda.set_rng_state(saved[0], device)
    elif saved and device is None and torch.cuda.device_count() == len(saved):
        torch.cuda.set_rng_state_all(saved)
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys, position, has_gauss, cached))
