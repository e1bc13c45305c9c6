"""The distributed recipes train as the single-device ones, and resume on other numbers of ranks."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpointing.cli.main import main
from checkpointing.errors import ConfigError
from tests.cli.command import environment, tune
from tests.sharded_worker import Job
from tests.training import runs
from tests.training.distributed_runs import Team
from tests.training.runs import checkpoints, metrics, same, weights
from tests.training.sharded_optimizer import loaded_and_gathered

SAVING = "save_every_n_steps=3"
# Four steps, of which the last one has a single row: the other processes have none.
MORE = ("gradient_accumulation_steps=1", "epochs=1", "lr_scheduler.num_warmup_steps=0", SAVING)
# Processes, the size of a tensor-parallel group, and the batch size of each process, so that the
# processes together have rows in batches of 4.
LAYOUTS = [
    pytest.param(2, 1, 2, id="fsdp"),
    pytest.param(2, 2, 4, id="tensor parallel"),
    pytest.param(4, 1, 1, id="fsdp of 4", marks=pytest.mark.slow),
    pytest.param(4, 2, 2, id="fsdp over tensor parallel", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def teams(tmp_path_factory):
    """The processes of a job of a size, started when they are asked for first."""
    started = {}

    def team(count):
        if count not in started:
            started[count] = Team(count, tmp_path_factory.mktemp(f"team_{count}"))
        return started[count]

    yield team
    for each in started.values():
        each.stop()


@pytest.fixture(scope="module")
def single(base, tmp_path_factory):
    """Runs of one process with rows in batches of 4, by kind, without what is random in a step."""
    done = {}

    def of(kind):
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp(f"single_{kind}")
            runs.run(kind, base, done[kind], "batch_size=4", *plain(kind), *MORE)
        return done[kind]

    return of


def plain(kind):
    return ["model.lora_dropout=0.0"] if kind == "lora" else []


def files(checkpoint):
    return {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*")}


def assert_close(found, expected, rel=2e-5):
    """Step by step: sums of fp32 numbers in another order."""
    assert sorted(found) == sorted(expected)
    for step, line in expected.items():
        assert found[step] == pytest.approx(line, rel=rel), step


@pytest.mark.parametrize(("count", "tensor_parallel", "batch_size"), LAYOUTS)
@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_is_that_of_one_process_with_all_the_rows(
    kind, count, tensor_parallel, batch_size, base, teams, single, tmp_path
):
    sizes = (f"batch_size={batch_size}", f"tensor_parallel_dim={tensor_parallel}")
    assert set(teams(count).run(kind, base, tmp_path, *sizes, *plain(kind), *MORE)) == {None}
    assert len(metrics(tmp_path)) == 4
    assert_close(metrics(tmp_path), metrics(single(kind)))
    assert checkpoints(tmp_path) == checkpoints(single(kind)) == {"step_3", "epoch_0"}
    for name in ("step_3", "epoch_0"):
        assert files(tmp_path / name) == files(single(kind) / name)
    found, expected = weights(tmp_path / "epoch_0"), weights(single(kind) / "epoch_0")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.allclose(found[name], tensor, atol=1e-4), name
    assert not same(found, weights(tmp_path / "step_3"))


@pytest.mark.parametrize(
    ("count", "tensor_parallel"),
    [
        (2, 1),
        pytest.param(4, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    kind, count, tensor_parallel, base, teams, tmp_path
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = (f"tensor_parallel_dim={tensor_parallel}", "batch_size=1", SAVING)
    assert set(teams(count).run(kind, base, whole, *settings)) == {None}
    place = f"resume_from_checkpoint={whole}/step_3"
    assert set(teams(count).run(kind, base, resumed, *settings, place)) == {None}
    steps = metrics(whole)
    assert metrics(resumed) == {step: line for step, line in steps.items() if step > 3}
    assert len(metrics(resumed)) >= 4
    assert same(weights(resumed / "epoch_1"), weights(whole / "epoch_1"))
    states = [
        torch.load(out / "epoch_1" / "recipe_state.pt", weights_only=True)
        for out in (whole, resumed)
    ]
    for number, values in states[0]["optimizer"]["state"].items():
        for key, value in values.items():
            assert torch.equal(states[1]["optimizer"]["state"][number][key], value), (number, key)
    # Each share of the rows has random numbers of its own, which go on too.
    assert len(states[0]["rng_state"]) == count // tensor_parallel or tensor_parallel == count


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_one_process_and_in_two_again(kind, base, teams, single, tmp_path):
    """Of the same rows in a step, whatever the number of processes."""
    two, one, two_again = (tmp_path / name for name in ("two", "one", "two_again"))
    more = [*plain(kind), *MORE, "epochs=3"]
    runs.run(kind, base, tmp_path / "whole", "batch_size=4", *more)
    assert set(teams(2).run(kind, base, two, "batch_size=2", *more)) == {None}
    place = f"resume_from_checkpoint={two}/step_3"
    runs.run(kind, base, one, "batch_size=4", *more, place)
    place = f"resume_from_checkpoint={one}/step_6"
    assert set(teams(2).run(kind, base, two_again, "batch_size=2", *more, place)) == {None}
    expected = metrics(tmp_path / "whole")
    assert min(metrics(one)) == 4 and min(metrics(two_again)) == 7
    assert_close({**metrics(two), **metrics(one), **metrics(two_again)}, expected, rel=1e-4)


def test_other_rows_in_a_step_than_before_are_refused(base, teams, single, tmp_path):
    place = f"resume_from_checkpoint={single('full')}/step_3"
    raised = teams(2).run("full", base, tmp_path, "batch_size=4", *MORE, place)
    assert [kind for kind, _ in raised] == [ConfigError] * 2
    assert "batch_size, of all processes together: 4 -> 8" in raised[0][1]
    assert checkpoints(tmp_path) == set()


def test_the_optimizer_steps_in_the_backward_pass_too(base, teams, tmp_path):
    settings = ("optimizer_in_bwd=True", "clip_grad_norm=null", *MORE)
    runs.run("full", base, tmp_path / "one", "batch_size=4", *settings)
    assert set(teams(2).run("full", base, tmp_path / "two", "batch_size=2", *settings)) == {None}
    assert_close(metrics(tmp_path / "two"), metrics(tmp_path / "one"))


def test_a_run_that_diverges_ends_in_all_processes(base, teams, tmp_path):
    settings = ("~lr_scheduler", "optimizer.lr=1e30", "save_every_n_steps=1", "batch_size=2")
    raised = teams(2).run("full", base, tmp_path, *settings)
    assert all("of step 2 is" in text and "Lower optimizer.lr" in text for _, text in raised)
    assert checkpoints(tmp_path) == {"step_1"}


def test_a_directory_that_another_run_has_claimed_is_refused_by_all(base, teams, tmp_path):
    from checkpointing.storage.run_lock import claimed

    with claimed(tmp_path):
        raised = teams(2).run("full", base, tmp_path, *MORE)
    assert [kind for kind, _ in raised] == [ConfigError] * 2
    assert all("another run saves into it" in text for _, text in raised)


def test_the_saved_model_and_adapter_compute_in_transformers_and_peft_what_was_trained(
    base, teams, tmp_path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = ("batch_size=2", "model.lora_attn_modules=[q_proj,k_proj]", "model.use_dora=True")
    assert set(teams(2).run("lora", base, tmp_path, *settings, *plain("lora"), *MORE)) == {None}
    saved = tmp_path / "epoch_0"
    tokens = torch.tensor([[3, 17, 102, 5, 44, 260]])
    plain_base = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        before = plain_base(tokens).logits
        adapted = PeftModel.from_pretrained(plain_base, saved)(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(saved / "merged")(tokens).logits
    assert (adapted - before).abs().max() > 1e-2
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert all(one.any() for one in load_file(saved / "adapter_model.safetensors").values())


def test_an_optimizer_state_of_one_process_is_taken_up_by_each_part(tmp_path):
    job = Job(2, tmp_path)
    try:
        for equal in job.run(loaded_and_gathered):
            assert equal == {"exp_avg": 3, "exp_avg_sq": 3, "step": 3}
    finally:
        job.stop()


def test_one_process_logs(base, teams, tmp_path):
    assert set(teams(2).run("lora", base, tmp_path, *MORE)) == {None}
    lines = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


class InterruptedAdamW(torch.optim.AdamW):
    """Sends a SIGTERM to the second process of a job within its second step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(closure)


def test_a_signal_that_one_process_gets_stops_all_after_the_same_step(base, teams, tmp_path):
    optimizer = "optimizer=tests.training.test_distributed_runs.InterruptedAdamW"
    codes = teams(2).run("lora", base, tmp_path, optimizer, "batch_size=1")
    assert codes == [143, 143]
    assert checkpoints(tmp_path) == {"step_2"}
    assert sorted(metrics(tmp_path)) == [1, 2]


def start(kind, base, out, *overrides):
    """Starts the command for two processes, whose steps are followed by a wait."""
    runs.recipe_config(kind, base, out)
    logger = "metric_logger=tests.training.test_stopping.SlowLogger"
    recipe = f"{kind}_finetune_distributed"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "checkpointing", "run", "--nproc_per_node", "2", recipe),
            *("--config", str(out / "recipe.yaml"), logger, *overrides),
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def wait_for(process, line):
    """Reads what a process prints up to a line."""
    while (read := process.stdout.readline()) != f"{line}\n":
        assert read, process.communicate()[1]


@pytest.mark.slow
def test_a_command_that_gets_a_signal_saves_once_and_goes_on_bit_for_bit(base, teams, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert set(teams(2).run("lora", base, whole, "batch_size=1")) == {None}
    process = start("lora", base, stopped, "batch_size=1")
    wait_for(process, "step 2")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert err.count("SIGTERM: stops when this step is done and saved") == 1
    assert "Traceback" not in out + err
    (name,) = checkpoints(stopped)
    assert name in ("step_2", "step_3")
    assert len(metrics(stopped)) == int(name.removeprefix("step_"))
    (command,) = re.findall(r"go on from the last checkpoint with: tune (.*)\n", err)
    assert command.startswith("run --nproc_per_node 2 lora_finetune_distributed --config ")
    done = tune(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert metrics(stopped) == metrics(whole)
    assert same(weights(stopped / "epoch_1"), weights(whole / "epoch_1"))


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_job_and_leaves_the_last_checkpoint(
    base, teams, tmp_path
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = ("batch_size=1", "save_every_n_steps=2")
    assert set(teams(2).run("full", base, whole, *settings)) == {None}
    process = start("full", base, killed, *settings)
    wait_for(process, "step 3")
    os.kill(rank_of_job(process.pid, 1), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 137, err
    assert err.count("error: rank 1 was ended by SIGKILL, and the job with it") == 1
    assert "go on from the last checkpoint with: tune run --nproc_per_node 2 full_finetune" in err
    assert "Traceback" not in out + err
    assert checkpoints(killed) == {"step_2"}
    assert main(["verify", str(killed / "step_2")]) == 0
    resumed = teams(2).run("full", base, killed, *settings, "resume_from_checkpoint=True")
    assert set(resumed) == {None}
    assert metrics(killed) == metrics(whole)
    assert same(weights(killed / "epoch_1"), weights(whole / "epoch_1"))


def rank_of_job(launcher, rank):
    """The process of a job that has a rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (found,) = (
        int(each)
        for each in children
        if f"RANK={rank}" in Path(f"/proc/{each}/environ").read_text().split("\0")
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [None, 2])
def test_a_second_signal_or_the_deadline_ends_all_without_saving(base, tmp_path, deadline):
    limit = [] if deadline is None else [f"stop_deadline_seconds={deadline}"]
    # One process waits as if a step took long, and the other one waits for it.
    process = start("lora", base, tmp_path, "+metric_logger.pause=60", *limit)
    wait_for(process, "step 1")
    workers = [rank_of_job(process.pid, rank) for rank in (0, 1)]
    process.send_signal(signal.SIGTERM)
    if deadline is None:
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 143, err
    assert ("SIGTERM: not done after 2 seconds" in err) == (deadline is not None)
    assert "interrupted before the first checkpoint; start again with: tune run" in err
    assert "Traceback" not in err
    assert checkpoints(tmp_path) == set()
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
def test_a_run_that_saves_in_the_background_is_one_that_does_not(base, teams, tmp_path):
    settings = ("batch_size=1", SAVING)
    for name, is_async in (("plain", False), ("async", True)):
        more = f"enable_async_checkpointing={is_async}"
        assert set(teams(2).run("lora", base, tmp_path / name, *settings, more)) == {None}
    assert metrics(tmp_path / "async") == metrics(tmp_path / "plain")
    assert checkpoints(tmp_path / "async") == checkpoints(tmp_path / "plain")
    for name in ("step_3", "epoch_1"):
        found = weights(tmp_path / "async" / name)
        assert same(found, weights(tmp_path / "plain" / name))
