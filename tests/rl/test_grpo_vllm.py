"""GRPO with the real vLLM: it agrees after every sync, and a killed run resumes exactly."""

import signal
import subprocess

import pytest

from checkpointing.resume import load_recipe_state
from tests.cli.command import environment
from tests.export.vllm_environment import vllm_environment
from tests.peers.environment import build_wheel
from tests.rl import grpo_runs
from tests.rl.grpo_runs import metrics
from tests.training import peers
from tests.training.runs import checkpoints, same, weights

pytestmark = pytest.mark.slow

# vLLM's attention on processors takes heads of 32 elements.
MODEL = peers.config(vocab=307, head_dim=32)
SETTINGS = (
    "engine=checkpointing.rl.rollout_engines.vllm_engine",
    "+engine.dtype=fp32",
    "+engine.enforce_eager=True",
    "+engine.max_model_len=128",
    "sync_every=3",
    "num_policy_updates=2",
    "save_every_n_steps=2",
    "~lr_scheduler",
)
KILLED = ("metric_logger=tests.rl.grpo_runs.KillingLogger", "+metric_logger.after=5")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return vllm_environment(build_wheel(tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = grpo_runs.write_base(tmp_path_factory.mktemp("base"))
    peers.hf_model(MODEL).save_pretrained(directory)
    return directory


def run(python, base, out, *settings):
    """Runs the recipe where vLLM is; returns the exit code."""
    file = grpo_runs.config_file(base, out)
    command = ["run", "grpo_lora_single_device", "--config", str(file), *SETTINGS, *settings]
    done = subprocess.run(
        [str(python), "-m", "checkpointing", *command],
        cwd=out,
        env=environment({"VLLM_CPU_KVCACHE_SPACE": "1"}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.parametrize("way", [("sync=merged",), ("sync=adapter", "+engine.max_lora_rank=8")])
def test_a_killed_run_resumes_bit_for_bit(python, base, tmp_path, way):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(python, base, whole, *way) == 0
    assert run(python, base, killed, *way, *KILLED) == -signal.SIGKILL
    assert checkpoints(killed) == {"step_2", "step_4"}
    held = load_recipe_state(killed / "step_4/recipe_state.pt")["rollouts"]["engine"]
    assert held["version"] == 3 and held["adapter"]
    assert run(python, base, killed, *way, "resume_from_checkpoint=True") == 0
    assert metrics(killed) == metrics(whole)
    assert same(weights(killed / "epoch_0"), weights(whole / "epoch_0"))
    lines = metrics(whole).values()
    assert len(lines) == 7 and all(line["engine_gap"] < 1e-5 for line in lines)
    assert len({line["loss"] for line in lines}) == 7
