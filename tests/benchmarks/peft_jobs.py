"""The jobs of PEFT and transformers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # imported late by transformers itself
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.benchmarks.drift import changed_share
from tests.benchmarks.durable import cleared, sync_tree, warm
from tests.benchmarks.figures import Figures

assert transformers


def _adapted(base: str, adapter: str) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return PeftModel.from_pretrained(model, adapter)


def merge(base: str, adapter: str, out: str) -> Callable[[], Any]:
    """Folds an adapter into its base, from directory to directory."""
    warm(Path(base))
    destination = cleared(Path(out))

    def run() -> None:
        _adapted(base, adapter).merge_and_unload().save_pretrained(destination)
        sync_tree(destination)

    return run


_kept = cache(_adapted)


def save_adapter(base: str, adapter: str, out: str) -> Callable[[], Any]:
    """Saves the adapter of a model that is trained."""
    model = _kept(base, adapter)
    destination = cleared(Path(out))

    def run() -> None:
        model.save_pretrained(destination)
        sync_tree(destination)

    return run


def stream(base: str, adapter: str) -> Callable[[], Any]:
    """Merges in place, copies each weight and lets go of the copy, and takes the adapter out."""
    model = _kept(base, adapter)
    return lambda: _export(model)


def _export(model: PeftModel) -> None:
    model.merge_adapter()
    for weight in _base_weights(model).values():
        weight.clone()
    model.unmerge_adapter()


def _base_weights(model: PeftModel) -> dict[str, Tensor]:
    """A tied head is the embedding, and is among them once."""
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" not in name}


def drift(base: str, adapter: str, exports: int) -> Callable[[], Any]:
    """Share of the base's weights that are others after so many exports."""
    model = _adapted(base, adapter)
    before = {name: weight.clone() for name, weight in _base_weights(model).items()}

    def run() -> Figures:
        for _ in range(exports):
            _export(model)
        return Figures(changed=changed_share(before, _base_weights(model)))

    return run
