"""Runs of the GRPO recipe in two processes: they learn what one process learns."""

import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.rl import grpo_runs
from tests.rl.grpo_runs import config_file, metrics
from tests.training.distributed_runs import Team
from tests.training.runs import checkpoints, same, weights

RECIPE = "grpo_lora_distributed"
# Of each process; with 13 prompts the second one has none in the last step.
SMALL = "batch_size=1"


def raising_in_one(prompts, completions, rows):
    """A reward that one process cannot give."""
    if dist.get_rank() == 1:
        raise KeyError("a row that is not there")
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    team = Team(2, tmp_path_factory.mktemp("team"))
    yield team
    team.stop()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return grpo_runs.write_base(tmp_path_factory.mktemp("base"))


def run(team, base, out, *settings):
    """Exit code of each process."""
    file = config_file(base, out)
    return team.tune("run", RECIPE, "--config", str(file), SMALL, *settings)


SETTINGS = {
    "merged": ("sync=merged", "forward_batch_size=2", "num_policy_updates=2"),
    "adapter, of earlier steps": ("sync=adapter", "sync_every=3", "save_every_n_steps=5"),
}


@pytest.fixture(scope="module", params=SETTINGS)
def whole(request, team, base, tmp_path_factory):
    """A run of 7 steps in two processes, with its settings."""
    out = tmp_path_factory.mktemp("whole")
    settings = SETTINGS[request.param]
    assert run(team, base, out, *settings) == [0, 0]
    return settings, out


def test_two_processes_learn_what_one_learns(whole, base, tmp_path):
    settings, out = whole
    grpo_runs.run(base, tmp_path, *settings)
    found, expected = metrics(out), metrics(tmp_path)
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4, 5, 6, 7]
    for step, line in expected.items():
        # The same completions, so that the rest differs by what is rounded.
        assert found[step].keys() == line.keys()
        assert found[step]["completion_length"] == line["completion_length"]
        assert found[step]["reward_mean"] == pytest.approx(line["reward_mean"], abs=1e-12)
        assert found[step]["reward_std"] == pytest.approx(line["reward_std"], abs=1e-12)
        for name in ("loss", "kl", "grad_norm", "clip_share", "lr"):
            assert found[step][name] == pytest.approx(line[name], rel=1e-3, abs=2e-6), (step, name)
        assert found[step]["engine_gap"] < 1e-5
    assert any(line["loss"] for line in expected.values())
    adapters = [load_file(each / "epoch_0/adapter_model.safetensors") for each in (out, tmp_path)]
    for name, tensor in adapters[1].items():
        torch.testing.assert_close(adapters[0][name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("whole", ["adapter, of earlier steps"], indirect=True)
def test_a_resumed_run_is_the_uninterrupted_one(whole, team, base, tmp_path):
    settings, out = whole
    # Between two syncs, so that the engine's weights are older than the model's.
    shutil.copytree(out / "step_5", tmp_path / "step_5")
    assert checkpoints(tmp_path) == {"step_5"}
    assert run(team, base, tmp_path, *settings, "resume_from_checkpoint=True") == [0, 0]
    found, expected = metrics(tmp_path), metrics(out)
    assert found == {step: expected[step] for step in (6, 7)}
    assert same(weights(tmp_path / "epoch_0"), weights(out / "epoch_0"))


def test_a_reward_that_fails_in_one_process_ends_the_run_in_all(team, base, tmp_path):
    reward = "reward._component_=tests.rl.test_grpo_distributed.raising_in_one"
    assert run(team, base, tmp_path, reward) == [1, 1]
    assert checkpoints(tmp_path) == set()
