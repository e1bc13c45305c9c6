"""The real Megatron-core 0.16.1 on a CPU: what is written here it loads and computes with, and what
it saves, rank by rank or together, is read here."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM

from checkpointing.convert import plan_conversion, write_model
from checkpointing.formats.detect import find_model
from checkpointing.mapping.model_parallel import Parallel
from tests.families.variants import IN_FP64, tokens
from tests.formats.megatron_model import config_of, write_hf
from tests.peers.environment import ROOT, run
from tests.tiny import assert_same_tensors

pytestmark = pytest.mark.slow

REQUIREMENTS = Path(__file__).with_name("megatron-requirements.txt")
WORKER = Path(__file__).with_name("megatron_worker.py")
PACKAGES = ROOT / ".venv-megatron"
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("llama", {}),
    "llama, four layers": ("llama", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", MIXTRAL),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}


@pytest.fixture(scope="session")
def megatron():
    """A directory with Megatron-core; all else that it needs on a CPU is there."""
    with FileLock(Path(tempfile.gettempdir()) / "megatron-packages.lock"):
        stamp = f"{sys.version}\n{REQUIREMENTS.read_text()}"
        file = PACKAGES / "versions.txt"
        if not file.is_file() or file.read_text() != stamp:
            shutil.rmtree(PACKAGES, ignore_errors=True)
            install = (sys.executable, "-m", "pip", "install", "--no-deps", "--target", PACKAGES)
            run(*install, "-r", REQUIREMENTS)
            file.write_text(stamp)
    return PACKAGES


def native(directory):
    source = find_model(directory).open().native
    return {name: source.read(name) for name in source.metas}


def with_config(directory, hf):
    shutil.copyfile(hf / "config.json", directory / "config.json")
    return directory


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        *((name, Parallel()) for name in MODELS),
        ("qwen2", Parallel(tensor=2)),
        ("llama", Parallel(pipeline=3)),
        ("llama, four layers", Parallel(tensor=2, pipeline=2)),
        ("mixtral", Parallel(expert=2)),
        ("qwen3_moe", Parallel(tensor=2, expert=2)),
    ],
    ids=str,
)
def test_megatron_loads_computes_with_and_saves_the_same_model(tmp_path, megatron, name, parallel):
    hf = write_hf(tmp_path / "hf", MODELS[name][0], **MODELS[name][1])
    write_model(plan_conversion(hf, "megatron", parallel=parallel), tmp_path / "out")
    config = config_of(hf)
    experts = config.get("num_local_experts") or config.get("num_experts")
    world = parallel.tensor * parallel.pipeline * parallel.expert
    task = {
        "world": world,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "expert": parallel.expert,
        "qk_norm": name.startswith("qwen3"),
        "expert_ffn": config.get("moe_intermediate_size", config["intermediate_size"])
        if experts
        else None,
        "experts_per_token": config.get("num_experts_per_tok", 2),
        "release": str(tmp_path / "out" / "release"),
        "store": str(tmp_path / "store"),
        "tokens": tokens().tolist(),
        "logits": str(tmp_path / "logits.pt"),
        "by_rank": str(tmp_path / "by_rank"),
        "together": str(tmp_path / "together"),
    }
    file = tmp_path / "task.json"
    file.write_text(json.dumps(task))
    environment = {**os.environ, "PYTHONPATH": str(megatron), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    logs = [(tmp_path / f"log{rank}.txt").open("w+") for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(file), str(rank)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait(timeout=600) for process in processes]
    for log in logs:
        log.seek(0)
    assert codes == [0] * world, "\n".join(log.read()[-3000:] for log in logs)

    expected = native(hf)
    assert_same_tensors(native(with_config(tmp_path / "by_rank", hf)), expected)
    for layout in ("stacked", "layers", "singles"):
        together = with_config(tmp_path / "together" / layout, hf)
        assert_same_tensors(native(together), expected)
    if world == 1:
        model = AutoModelForCausalLM.from_pretrained(hf, dtype="auto", **IN_FP64).eval()
        with torch.inference_mode():
            wanted = model(input_ids=tokens()).logits
        found = torch.load(task["logits"], weights_only=True)[..., : config["vocab_size"]]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
