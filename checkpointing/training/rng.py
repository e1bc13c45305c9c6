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


def rng_state() -> dict[str, Any]:
    """States of torch, CUDA if it is in use, Python, and numpy if it is in use.

    The values load with ``torch.load(weights_only=True)``.
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what :func:`rng_state` gave, as far as it is in use here."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys, position, has_gauss, cached))
