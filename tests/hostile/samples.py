"""Small valid checkpoints of every kind, and what reads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpointing import (
    AdapterConfig,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
)
from checkpointing.comparable import open_pair
from checkpointing.convert import plan_conversion
from checkpointing.describe import describe
from checkpointing.merge import plan_merge
from tests.formats.megatron_model import write_megatron
from tests.formats.test_meta import meta_weights, write_meta
from tests.formats.test_torch_dist import stacked, write_dist
from tests.tiny import random_adapter, random_native, write_hf
from tests.training.peers import config, hf_model

CONFIG = config(layers=2, vocab=23, hidden=12, ffn=11, heads=3, kv_heads=1, head_dim=6)
ADAPTER = AdapterConfig(4, 9.0, ("q_proj", "w2"))
PARAMS = {
    "dim": 12,
    "n_layers": 2,
    "n_heads": 3,
    "n_kv_heads": 1,
    "head_dim": 6,
    "vocab_size": 23,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
RECIPE_STATE = {
    "epochs_run": 1,
    "optimizer": {"state": {0: {"exp_avg": torch.ones(3, 5), "step": torch.tensor(7.0)}}},
    "seed": 5,
    "rng": b"\xff\x00ab",
    "names": ["a", ("b", 2.5, None, True)],
}


def write_hf_model(directory: Path, **options: object) -> Path:
    return write_hf(hf_model(CONFIG), directory, **options)


def write_bin_model(directory: Path) -> Path:
    model = hf_model(CONFIG)
    write_hf(model, directory)
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    return directory


def write_meta_model(directory: Path, ranks: int = 1) -> Path:
    return write_meta(directory, meta_weights(random_native(CONFIG)), ranks, 1, PARAMS)


def write_tune_model(directory: Path) -> Path:
    directory.mkdir()
    torch.save(random_native(CONFIG), directory / "model-00001-of-00001.bin")
    (directory / "params.json").write_text(json.dumps(PARAMS))
    return directory


def write_megatron_model(directory: Path) -> Path:
    """Of two tensor-parallel ranks, with what Megatron keeps beside the weights."""
    base = write_hf_model(directory.with_name("base"))
    config = {"num_attention_heads": CONFIG.dims.heads, "num_query_groups": 1}
    options: dict[str, Any] = {"settings": config}
    return write_megatron(directory, base, tensor=1, pipeline=2, **options)


def write_distributed_model(directory: Path) -> Path:
    """As all ranks of a Megatron job write it together."""
    return write_dist(directory, write_hf_model(directory.with_name("base")), stacked, {})


def write_run(base: Path, output_dir: Path) -> Path:
    """A checkpoint of an adapter run: native and PEFT's adapter, recipe state, manifest."""
    state = {
        "adapter": random_adapter(CONFIG.dims, ADAPTER),
        "adapter_config": ADAPTER.to_state(),
        **RECIPE_STATE,
    }
    checkpointer = FullModelHFCheckpointer(base, output_dir=output_dir)
    return checkpointer.save_checkpoint(state, epoch=0, step=3, adapter_only=True)


CHECKPOINTERS = {
    "hf": FullModelHFCheckpointer,
    "meta": FullModelMetaCheckpointer,
    "tune": FullModelTorchTuneCheckpointer,
}


def model_readers(directory: Path, format: str) -> list[Callable[[], object]]:
    """All that reads a model."""
    return [
        lambda: CHECKPOINTERS[format](directory).load_checkpoint(),
        lambda: _read_all(plan_conversion(directory, "meta").tensors),
        lambda: plan_conversion(directory, "hf"),
        lambda: plan_conversion(directory, "tune"),
        lambda: describe(directory),
    ]


def megatron_readers(directory: Path) -> list[Callable[[], object]]:
    """All that reads a model of Megatron's, for which there is no checkpointer."""
    return [
        lambda: _read_all(plan_conversion(directory, "hf").tensors),
        lambda: describe(directory),
        lambda: open_pair(directory, directory),
    ]


def adapter_readers(base: Path, adapter: Path) -> list[Callable[[], object]]:
    """All that reads an adapter."""
    return [
        lambda: FullModelHFCheckpointer(base, adapter_checkpoint=adapter).load_checkpoint(),
        lambda: _read_all(plan_merge(base, adapter).plan.tensors),
        lambda: describe(adapter, base=base),
    ]


def resuming_readers(base: Path, output_dir: Path) -> list[Callable[[], object]]:
    """All that reads a checkpoint of a run."""

    def resume(resumed: bool | str) -> object:
        return FullModelHFCheckpointer(
            base, output_dir=output_dir, should_load_recipe_state=resumed
        ).load_checkpoint()

    return [lambda: resume(True), lambda: resume(str(output_dir / "epoch_0"))]


def _read_all(tensors) -> None:
    for name in tensors.metas:
        tensors.read(name)


def write_peft_adapter(root: Path) -> tuple[Path, Path]:
    """A base, and a directory that holds just a PEFT adapter of it."""
    base = write_hf_model(root / "model")
    directory = write_run(base, root / "out")
    adapter = root / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(directory / name, adapter / name)
    return base, adapter


def reader_of_named_state(base: Path, file: Path) -> Callable[[], dict[str, object]]:
    """Resuming with a recipe state that is named, as with torchtune's checkpoints."""
    return lambda: FullModelHFCheckpointer(
        base,
        output_dir=base.parent / "resumed",
        recipe_checkpoint=file,
        should_load_recipe_state=True,
    ).load_checkpoint()
