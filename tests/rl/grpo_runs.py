"""Runs of the GRPO recipe on a tiny model, and what they need."""

import json
import os
import signal
import string
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from checkpointing.export.engines.transformers_engine import TransformersEngine
from checkpointing.rl.rollout_engines import transformers_engine
from checkpointing.training import DiskLogger
from checkpointing.training.config import load_config
from recipes import grpo_lora_single_device as recipe
from tests.training import runs

TIMES = ("tokens_per_second", "sync_seconds", "save_blocked_seconds", "save_written_seconds")


def share_of_digits(prompts, completions, rows):
    """The reward of the toy task."""
    return [sum(c in string.digits for c in text) / max(1, len(text)) for text in completions]


def one_too_few(prompts, completions, rows):
    return [0.5] * (len(completions) - 1)


def not_finite(prompts, completions, rows):
    return [0.5] * (len(completions) - 1) + [float("nan")]


def raising(prompts, completions, rows):
    return [row["no such key"] for row in rows]


def without_rows(prompts, completions):
    return [0.0] * len(completions)


class StaleEngine(TransformersEngine):
    """Says that it has taken new weights, but has done so only once."""

    def load_merged(self, stream):
        if self.version < 0:
            super().load_merged(stream)
        self.version = stream.version


def stale_engine(checkpoint_dir):
    return StaleEngine(transformers_engine(checkpoint_dir)._model)


class KillingLogger(DiskLogger):
    """Logs to disk, and kills the process after a step."""

    def __init__(self, log_dir, after):
        super().__init__(log_dir)
        self._after = after

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step == self._after:
            os.kill(os.getpid(), signal.SIGKILL)


def write_base(directory: Path) -> Path:
    """A tiny model as a Hugging Face directory, with its tokenizer and 13 prompts."""
    runs.write_base(directory)
    words = ["red", "blue", "thanks", "welcome", "brief"]
    rows = ({"prompt": f"{words[n % 5]} {n}", "answer": n * 7} for n in range(13))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "prompts.jsonl").write_text(text)
    return directory


def config_file(base: Path, out: Path) -> Path:
    """Writes a config: 2 prompts a step, 3 completions of each, 7 steps an epoch."""
    config: dict[str, Any] = {
        "output_dir": str(out),
        "model": {
            "lora_attn_modules": ["q_proj", "v_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": 4,
            "lora_alpha": 9,
        },
        "checkpointer": {
            "_component_": "checkpointing.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "output_dir": "${output_dir}",
        },
        "tokenizer": {"_component_": "checkpointing.training.ChatTokenizer", "path": str(base)},
        "dataset": {
            "_component_": "checkpointing.rl.prompts.PromptDataset",
            "source": str(base / "prompts.jsonl"),
        },
        "batch_size": 2,
        "seed": 5,
        "engine": {
            "_component_": "checkpointing.rl.rollout_engines.transformers_engine",
            "checkpoint_dir": str(base),
        },
        "sampling": {
            "_component_": "checkpointing.export.engines.Sampling",
            "max_new_tokens": 6,
        },
        "group_size": 3,
        "reward": {"_component_": "tests.rl.grpo_runs.share_of_digits"},
        "objective": {"_component_": "checkpointing.rl.grpo.Objective"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "lr_scheduler": {
            "_component_": "checkpointing.training.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        "clip_grad_norm": 1.0,
        "epochs": 1,
        "metric_logger": {
            "_component_": "checkpointing.training.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), out / "recipe.yaml")
    return out / "recipe.yaml"


def grpo_config(base: Path, out: Path, *overrides: str) -> Any:
    """The config, changed."""
    return load_config(config_file(base, out), overrides, known_keys=recipe.CONFIG_KEYS)


def run(base: Path, out: Path, *overrides: str) -> None:
    """Runs the recipe."""
    recipe.main(grpo_config(base, out, *overrides))


def run_until(step: int, base: Path, out: Path, *overrides: str) -> None:
    """Runs the recipe and stops it after a step, before it saves at that step."""
    cfg = grpo_config(base, out, *overrides)
    cfg.metric_logger = {
        "_component_": "tests.training.runs.StoppingLogger",
        "log_dir": str(out / "logs"),
        "stop_after": step,
    }
    try:
        recipe.main(cfg)
    except runs.Stopped:
        return
    raise AssertionError(f"the run has no step {step}")


def metrics(out: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step, without times; the last line of a step counts."""
    lines = map(json.loads, (out / "logs/metrics.jsonl").read_text().splitlines())
    return {
        line.pop("step"): {key: value for key, value in line.items() if key not in TIMES}
        for line in lines
    }
