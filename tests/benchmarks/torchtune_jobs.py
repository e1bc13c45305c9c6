"""The jobs of the real torchtune, which runs in an environment of its own."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torchtune import training
from torchtune.modules.peft import get_merged_lora_ckpt

from tests.benchmarks.durable import cleared, files_of, sync_tree, warm
from tests.benchmarks.touch import touched

_MODEL_TYPE = "LLAMA3_2"
_CLASSES = {
    "hf": "FullModelHFCheckpointer",
    "meta": "FullModelMetaCheckpointer",
    "tune": "FullModelTorchTuneCheckpointer",
}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


def _checkpointer(format: str, base: str, out: str) -> Any:
    files = [path.name for path in files_of(Path(base)) if path.suffix in _WEIGHTS]
    return getattr(training, _CLASSES[format])(
        checkpoint_dir=base, checkpoint_files=files, model_type=_MODEL_TYPE, output_dir=out
    )


def _saver(format: str, base: str, out: str) -> Any:
    cleared(Path(out))
    saver = _checkpointer(format, base, out)
    if format == "hf":
        saver.load_checkpoint()  # it writes each tensor into the file that it was read from
    return saver


@cache
def _weights(format: str, base: str, out: str) -> dict[str, torch.Tensor]:
    weights = _checkpointer(format, base, out).load_checkpoint()["model"]
    return {name: tensor.clone() for name, tensor in weights.items()}


def load(base: str, out: str) -> Callable[[], Any]:
    """Loads native weights, and reads of every page."""
    warm(Path(base))
    return lambda: touched(_checkpointer("hf", base, out).load_checkpoint()["model"])


def save(base: str, out: str, format: str = "hf") -> Callable[[], Any]:
    """Saves a checkpoint of all weights."""
    weights, saver = _weights(format, base, out), _saver(format, base, out)

    def run() -> None:
        saver.save_checkpoint({"model": {**weights}}, epoch=0)
        sync_tree(Path(out))

    return run


def merge(base: str, adapter: str, out: str) -> Callable[[], Any]:
    """What its LoRA recipe does at the end, with loading before it."""
    warm(Path(base))
    cleared(Path(out))
    rank, alpha = 16, 32

    def run() -> None:
        checkpointer = _checkpointer("hf", base, out)
        weights = checkpointer.load_checkpoint()["model"]
        weights |= torch.load(adapter, weights_only=True)
        merged = get_merged_lora_ckpt(weights, rank=rank, alpha=alpha)
        checkpointer.save_checkpoint({"model": merged}, epoch=0)
        sync_tree(Path(out))

    return run


def convert(source: str, source_format: str, to: str, like: str, out: str) -> Callable[[], Any]:
    """Loads with one checkpointer and saves with another.

    Args:
        source: the model.
        source_format: its format.
        to: format to write.
        like: a model in that format, which its checkpointers ask for.
        out: where to.
    """
    warm(Path(source))
    saver = _saver(to, like, out)

    def run() -> None:
        weights = _checkpointer(source_format, source, out).load_checkpoint()["model"]
        saver.save_checkpoint({"model": weights}, epoch=0)
        sync_tree(Path(out))

    return run


def save_adapter(base: str, adapter: str, out: str) -> Callable[[], Any]:
    """Saves the adapter of a LoRA run."""
    saver = _saver("hf", base, out)
    tensors = torch.load(adapter, weights_only=True)
    modules = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
    config = {"r": 16, "lora_alpha": 32, "target_modules": modules, "peft_type": "LORA"}

    def run() -> None:
        state = {"adapter": {**tensors}, "adapter_config": {**config}}
        saver.save_checkpoint(state, epoch=0, adapter_only=True)
        sync_tree(Path(out))

    return run
