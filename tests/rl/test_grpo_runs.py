"""Runs of the GRPO recipe: it learns, resumes exactly, and stops where an engine is wrong."""

import json
import signal

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpointing.cli.main import main
from checkpointing.errors import ConfigError
from checkpointing.resume import load_recipe_state
from checkpointing.rl.reward_function import RewardError
from checkpointing.rl.synced_engine import EngineDisagreesError
from tests.cli.command import tune
from tests.rl import grpo_runs
from tests.rl.grpo_runs import grpo_config, metrics, run, run_until
from tests.training import runs
from tests.training.runs import checkpoints, same, weights

RESUME = "resume_from_checkpoint=True"
SAVING = "save_every_n_steps=2"
RECIPE = "grpo_lora_single_device"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return grpo_runs.write_base(tmp_path_factory.mktemp("base"))


WAYS = [(way, every) for way in ("merged", "adapter") for every in (1, 3)]


@pytest.fixture(scope="module", params=WAYS, ids=lambda each: f"{each[0]}, every {each[1]}")
def whole(request, base, tmp_path_factory):
    """A run of 7 steps that nothing interrupts, with its settings."""
    way, every = request.param
    settings = (f"sync={way}", f"sync_every={every}", "num_policy_updates=2", SAVING)
    out = tmp_path_factory.mktemp("whole")
    run(base, out, *settings)
    return settings, out


def test_each_step_says_what_it_did(whole):
    settings, out = whole
    lines = metrics(out)
    assert sorted(lines) == [1, 2, 3, 4, 5, 6, 7]
    every = 1 if "sync_every=1" in settings else 3
    for step, line in lines.items():
        assert 0 <= line["reward_mean"] <= 1 and line["reward_std"] >= 0
        assert 1 <= line["completion_length"] <= 6
        assert line["grad_norm"] >= 0 and 0 <= line["clip_share"] <= 1
        assert 0 <= line["engine_gap"] < 1e-5
        synced = (step - 1) % every == 0
        assert ("sync_lost" in line) == (synced and "sync=merged" in settings)
    assert len({line["loss"] for line in lines.values()}) == 7
    logged = map(json.loads, (out / "logs/metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in logged if "sync_seconds" in line] == [*range(1, 8, every)]
    # The learning rate is 0 in the first step, and so is the divergence from the base.
    assert lines[1]["kl"] == 0.0 and lines[7]["kl"] > 0


@pytest.mark.parametrize(("stopped_after", "newest"), [(5, "step_4"), (7, "step_6"), (3, "step_2")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    whole, base, tmp_path, stopped_after, newest
):
    settings, uninterrupted = whole
    run_until(stopped_after, base, tmp_path, *settings)
    saved = checkpoints(tmp_path)
    assert newest in saved and f"step_{stopped_after}" not in saved
    torch.manual_seed(1234)
    run(base, tmp_path, *settings, RESUME)
    assert metrics(tmp_path) == metrics(uninterrupted)
    assert same(weights(tmp_path / "epoch_0"), weights(uninterrupted / "epoch_0"))
    found, expected = (
        load_recipe_state(out / "epoch_0/recipe_state.pt") for out in (tmp_path, uninterrupted)
    )
    for number, values in expected["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(found["optimizer"]["state"][number][key], value)
    assert torch.equal(found["rng_state"]["torch"], expected["rng_state"]["torch"])


def test_a_killed_run_resumes_bit_for_bit(base, tmp_path):
    settings = ("sync_every=2", "save_every_n_steps=1", "max_steps_per_epoch=4")
    run(base, tmp_path / "whole", *settings)
    file = grpo_runs.config_file(base, tmp_path / "killed")
    done = tune(
        "run",
        RECIPE,
        "--config",
        str(file),
        *settings,
        "metric_logger=tests.rl.grpo_runs.KillingLogger",
        "+metric_logger.after=2",
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoints(tmp_path / "killed") == {"step_1"}
    run(base, tmp_path / "killed", *settings, RESUME)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    killed, whole = weights(tmp_path / "killed/epoch_0"), weights(tmp_path / "whole/epoch_0")
    assert same(killed, whole)


def test_the_state_says_which_weights_the_engine_has(whole):
    settings, out = whole
    state = load_recipe_state(out / "step_4/recipe_state.pt")["rollouts"]
    assert state["sampling"] == {
        "max_new_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "seed": None,
        "stop_token_ids": (2,),
    }
    held = state["engine"]["adapter"]
    assert state["engine"]["version"] == 3
    if "sync_every=1" in settings:
        assert not held
        return
    adapter = torch.load(out / "step_4/adapter_model.pt", weights_only=True)
    assert held.keys() == adapter.keys()
    assert any(not torch.equal(held[name], adapter[name]) for name in held)


def test_saving_in_the_background_is_the_same_run(base, tmp_path):
    settings = ("sync_every=3", "save_every_n_steps=1", "max_steps_per_epoch=4")
    run(base, tmp_path / "plain", *settings)
    run(base, tmp_path / "async", *settings, "enable_async_checkpointing=True")
    assert metrics(tmp_path / "async") == metrics(tmp_path / "plain")
    for name in checkpoints(tmp_path / "plain"):
        assert same(weights(tmp_path / "async" / name), weights(tmp_path / "plain" / name))
        held = [
            load_recipe_state(tmp_path / kind / name / "recipe_state.pt")["rollouts"]["engine"]
            for kind in ("plain", "async")
        ]
        assert held[0]["version"] == held[1]["version"]
        assert same(held[0]["adapter"], held[1]["adapter"])


def test_on_fresh_weights_the_ratio_is_one_and_on_older_ones_it_is_not(base, tmp_path):
    """With one update a step, only completions of an older policy can be clipped."""
    settings = ("optimizer.lr=0.2", "~lr_scheduler", "max_steps_per_epoch=4")
    run(base, tmp_path / "fresh", *settings)
    run(base, tmp_path / "older", *settings, "sync_every=4")
    assert [line["clip_share"] for line in metrics(tmp_path / "fresh").values()] == [0.0] * 4
    shares = [line["clip_share"] for line in metrics(tmp_path / "older").values()]
    assert shares[0] == 0.0 and max(shares[1:]) > 0.05
    # The engine is compared with the weights that it has, not with those that are trained.
    assert all(line["engine_gap"] < 1e-5 for line in metrics(tmp_path / "older").values())


def test_passes_of_a_few_completions_make_the_same_step(base, tmp_path):
    settings = ("~lr_scheduler", "max_steps_per_epoch=2", "optimizer=torch.optim.SGD")
    run(base, tmp_path / "all", *settings)
    run(base, tmp_path / "some", *settings, "forward_batch_size=4")
    for step, line in metrics(tmp_path / "all").items():
        assert metrics(tmp_path / "some")[step] == pytest.approx(line, rel=1e-3, abs=1e-6)


def test_the_checkpoint_is_an_adapter_of_peft_and_a_merged_model(base, tmp_path):
    run(base, tmp_path, "max_steps_per_epoch=3", "~lr_scheduler")
    saved = tmp_path / "epoch_0"
    ids = torch.arange(23)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(saved / "merged")(ids).logits
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved)
        assert (peft(ids).logits - merged).abs().max() < 1e-4
    assert (merged - plain).abs().max() > 0.01
    assert load_file(saved / "adapter_model.safetensors")


def test_equal_rewards_train_nothing(base, tmp_path):
    """No group tells good from bad, and the policy is the reference."""
    constant = "reward=checkpointing.rl.rewards.has_format"
    run(base, tmp_path, constant, "+reward.pattern=.*", "~lr_scheduler", "max_steps_per_epoch=2")
    for line in metrics(tmp_path).values():
        assert (line["reward_mean"], line["reward_std"]) == (1.0, 0.0)
        assert (line["loss"], line["grad_norm"], line["kl"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["raising", "one_too_few"])
def test_a_failing_reward_ends_the_run_and_is_named(base, tmp_path, name):
    with pytest.raises(RewardError, match=rf"tests\.rl\.grpo_runs\.{name} "):
        run(base, tmp_path, f"reward=tests.rl.grpo_runs.{name}")
    assert not checkpoints(tmp_path)


def test_an_engine_that_did_not_take_the_weights_is_found_before_anything_is_learnt(base, tmp_path):
    with pytest.raises(EngineDisagreesError, match=r"sync of version 2 .sync=merged"):
        run(base, tmp_path, "engine=tests.rl.grpo_runs.stale_engine", "save_every_n_steps=1")
    # The learning rate of the first step is 0.
    assert checkpoints(tmp_path) == {"step_1", "step_2"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sync=merge", "sync=merge: did you mean 'merged'"),
        ("sync_every=0", "sync_every=0"),
        ("sampling.max_new_tokens=500", "dataset.max_prompt_tokens to at most 12"),
        ("group_size=1", "group_size=1"),
        ("num_policy_updates=0", "num_policy_updates=0"),
        ("forward_batch_size=0", "forward_batch_size=0"),
        ("+model.lora_dropout=0.1", r"no key 'model\.lora_dropout'"),
        ("+sampling.seed=3", r"sampling\.seed"),
        ("+sampling.temperature=0", r"sampling\.temperature=0"),
        ("+sampling.temprature=1", "did you mean 'temperature'"),
        ("+objective.clip_eps=0.1", "did you mean 'clip_epsilon'"),
        ("reward=tests.rl.grpo_runs.share_of_digit", "did you mean .share_of_digits"),
    ],
)
def test_impossible_settings_are_refused_before_the_first_step(base, tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        run(base, tmp_path, override)
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+group_sise=3", "did you mean 'group_size'"),
        ("+model.lora_dropout=0.1", "unknown key 'lora_dropout'"),
    ],
)
def test_a_key_that_the_recipe_does_not_know_is_refused(base, tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        grpo_config(base, tmp_path, override.lstrip("+"))


def test_validate_finds_wrong_arguments(base, tmp_path, capsys):
    file = grpo_runs.config_file(base, tmp_path)
    assert main(["validate", str(file)]) == 0
    assert main(["validate", str(file), "+sampling.max_tokens=3"]) == 1
    assert "max_new_tokens" in capsys.readouterr().err


def test_what_changes_the_rollouts_of_a_resumed_run_is_shown(base, tmp_path, capsys):
    run(base, tmp_path, "max_steps_per_epoch=1")
    capsys.readouterr()
    changed = ("group_size=2", "objective.kl_coeff=0.5", "max_steps_per_epoch=1", "epochs=2")
    run(base, tmp_path, "+" + changed[1], *changed[:1], *changed[2:], RESUME)
    shown = capsys.readouterr().out
    assert "  group_size: 3 -> 2 (from here on)" in shown
    assert "  objective.kl_coeff: null -> 0.5 (from here on)" in shown
    assert sorted(metrics(tmp_path)) == [1, 2]


def test_a_run_of_another_recipe_is_not_resumed(base, tmp_path):
    runs.run("lora", base, tmp_path, "epochs=1", "max_steps_per_epoch=1")
    with pytest.raises(ConfigError, match="no run of this recipe"):
        run(base, tmp_path, RESUME)


# Learning

TOY = (
    *("batch_size=6", "group_size=8", "optimizer.lr=0.01", "~lr_scheduler"),
    *("sampling.max_new_tokens=8", "+objective.kl_coeff=0.01", "save_adapter_weights_only=True"),
)


def rewards_of(base, out, *settings):
    """Mean rewards of the first and of the last five steps; 3 steps are an epoch."""
    run(base, out, *TOY, *settings)
    rewards = [line["reward_mean"] for line in metrics(out).values()]
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


def test_the_reward_rises(base, tmp_path):
    first, last = rewards_of(base, tmp_path, "epochs=12")
    assert first < 0.1 and last > 0.6


@pytest.mark.slow
def test_the_reward_rises_with_completions_of_older_weights(base, tmp_path):
    settings = ("sync=adapter", "sync_every=2", "num_policy_updates=2", "epochs=40")
    first, last = rewards_of(base, tmp_path, *settings)
    assert first < 0.1 and last > 0.6
