"""The jobs of PEFT and transformers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # imported late by transformers itself
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.benchmarks.durable import cleared, sync_tree, warm

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
