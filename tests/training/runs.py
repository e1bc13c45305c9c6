"""Runs of the recipes on tiny models, and what they leave behind."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from checkpointing.training import DiskLogger
from checkpointing.training.config import load_config
from recipes import full_finetune_single_device, lora_finetune_single_device
from tests.training import peers
from tests.training.tiny_tokenizer import write_tokenizer

RECIPES = {"lora": lora_finetune_single_device, "full": full_finetune_single_device}
MODEL = peers.config(vocab=307)


class Stopped(Exception):
    """A run was stopped on purpose."""


class StoppingLogger(DiskLogger):
    """Logs to disk, and stops the run right after a step, before anything more is saved."""

    def __init__(self, log_dir: str, stop_after: int) -> None:
        super().__init__(log_dir)
        self._stop_after = stop_after

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        super().log_dict(payload, step)
        if step == self._stop_after:
            raise Stopped


def write_base(directory: Path) -> Path:
    """A tiny model as a Hugging Face directory, with tokenizer and data."""
    peers.hf_model(MODEL).save_pretrained(directory)
    write_tokenizer(directory)
    write_rows(directory / "rows.jsonl")
    return directory


def write_rows(file: Path) -> None:
    """Writes 13 conversations."""
    words = ["red", "blue", "thanks", "welcome", "brief"]
    rows = (
        {"instruction": f"{word} {number}", "output": f"{word[::-1]} {number * 7}"}
        for number, word in enumerate(words * 3)
        if number < 13
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_config(kind: str, base: Path, out: Path, *overrides: str) -> Any:
    """13 conversations in batches of 2, two batches a step: 4 steps an epoch, the last smaller."""
    config: dict[str, Any] = {
        "output_dir": str(out),
        "checkpointer": {
            "_component_": "checkpointing.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "output_dir": "${output_dir}",
        },
        "tokenizer": {"_component_": "checkpointing.training.ChatTokenizer", "path": str(base)},
        "dataset": {
            "_component_": "checkpointing.training.InstructDataset",
            "source": str(base / "rows.jsonl"),
        },
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "seed": 5,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
        "lr_scheduler": {
            "_component_": "checkpointing.training.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        },
        "clip_grad_norm": 1.0,
        "epochs": 2,
        "metric_logger": {
            "_component_": "checkpointing.training.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
    }
    if kind == "lora":
        config["model"] = {
            "lora_attn_modules": ["q_proj", "v_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": 3,
            "lora_alpha": 7,
            "lora_dropout": 0.3,
        }
    out.mkdir(parents=True, exist_ok=True)
    file = out / "recipe.yaml"
    OmegaConf.save(OmegaConf.create(config), file)
    return load_config(file, overrides, known_keys=RECIPES[kind].CONFIG_KEYS)


def run(kind: str, base: Path, out: Path, *overrides: str) -> None:
    """Runs a recipe."""
    RECIPES[kind].main(recipe_config(kind, base, out, *overrides))


def run_until(step: int, kind: str, base: Path, out: Path, *overrides: str) -> None:
    """Runs a recipe and stops it after a step, before it saves at that step."""
    cfg = recipe_config(kind, base, out, *overrides)
    cfg.metric_logger = {
        "_component_": "tests.training.runs.StoppingLogger",
        "log_dir": str(out / "logs"),
        "stop_after": step,
    }
    try:
        RECIPES[kind].main(cfg)
    except Stopped:
        return
    raise AssertionError(f"the run has no step {step}")


def metrics(out: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step, without the speed; the last line of a step counts."""
    lines = map(json.loads, (out / "logs/metrics.jsonl").read_text().splitlines())
    return {line.pop("step"): _without_speed(line) for line in lines}


def _without_speed(line: dict[str, float]) -> dict[str, float]:
    assert line.pop("tokens_per_second") > 0
    return {key: value for key, value in line.items() if not key.startswith("save_")}


def checkpoints(out: Path) -> set[str]:
    """Names of the checkpoints that a run left."""
    return {path.parent.name for path in out.glob("*/manifest.json")}


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """All weights in a Hugging Face checkpoint directory: model, adapter and merged model."""
    return {
        f"{file.relative_to(checkpoint)}: {name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )
