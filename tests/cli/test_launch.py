"""`tune run --nproc_per_node`: real processes, and how their ending is told."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.cli.main import main
from tests.cli.command import environment, tune

RECIPE = """
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from checkpointing.errors import ConfigError

CONFIG_KEYS = frozenset({"does", "output_dir", "resume_from_checkpoint"})
RANK = int(os.environ.get("RANK", -1))


def main(cfg):
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']}", flush=True)
    print(f"rank {RANK} complains", file=sys.stderr, flush=True)
    if cfg.does == "refuse":
        raise ConfigError("a key is wrong")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    if cfg.does == "refuse first":
        from checkpointing.training import first_rank_first

        with first_rank_first():
            raise ConfigError("a file is wrong")
    if RANK == 1:
        if cfg.does == "fail":
            raise ValueError("only one has failed")
        if cfg.does == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if cfg.does == "exit":
            os._exit(7)
        if cfg.does == "fail once" and not cfg.get("resume_from_checkpoint"):
            os.makedirs("out/step_3")
            open("out/step_3/manifest.json", "w").close()
            raise ValueError("the first time")
    if cfg.does == "wait":
        print("waits", flush=True)
        time.sleep(60)
    dist.barrier()
    dist.destroy_process_group()
    print(f"resumed: {cfg.get('resume_from_checkpoint')}", flush=True)
"""
RUN = ("run", "--nproc_per_node", "2")
COMMAND = ("recipe.py", "--config", "config.yaml")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with a recipe and a config."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "config.yaml").write_text("output_dir: out\ndoes: nothing\n")
    return tmp_path


@pytest.mark.slow
def test_the_first_process_writes_to_the_terminal_and_the_others_to_files(own: Path) -> None:
    done = tune(*RUN, "--log_dir", "logs", *COMMAND, cwd=own)
    assert (done.returncode, done.stderr) == (0, "rank 0 complains\n")
    assert done.stdout == "rank 0 of 2\nresumed: None\n"
    assert (own / "logs" / "rank_1.log").read_text().splitlines()[:2] == [
        "rank 1 of 2",
        "rank 1 complains",
    ]


def test_an_error_of_all_is_shown_once(own: Path) -> None:
    done = tune(*RUN, *COMMAND, "does=refuse", cwd=own)
    assert done.returncode == 1
    # The slower process may have been ended before it came to it.
    shown = r"(rank 0 complains\n)?error: a key is wrong\n(\(raised by rank 1\)\n)?"
    assert re.fullmatch(shown, done.stderr), done.stderr


@pytest.mark.slow
def test_an_error_that_the_first_has_told_the_others_is_its_own(own: Path) -> None:
    done = tune(*RUN, *COMMAND, "does=refuse first", cwd=own)
    assert (done.returncode, done.stderr) == (1, "rank 0 complains\nerror: a file is wrong\n")


@pytest.mark.parametrize(
    ("does", "code", "start", "end"),
    [
        (
            "fail",
            1,
            "Traceback (most recent",
            "ValueError: only one has failed\n(raised by rank 1)",
        ),
        (
            "crash",
            128 + signal.SIGSEGV,
            "error: rank 1 was ended by SIGSEGV, and the job with it. The end of its output:",
            "start again with: tune run --nproc_per_node 2 recipe.py --config config.yaml "
            "does=crash",
        ),
        pytest.param(
            "exit",
            7,
            "error: rank 1 ended with exit code 7. The end of its output:",
            "rank 1 complains",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_ended_one_process_is_told_and_not_that_the_others_lost_it(
    own: Path, does: str, code: int, start: str, end: str
) -> None:
    done = tune(*RUN, *COMMAND, f"does={does}", cwd=own)
    assert done.returncode == code
    shown = done.stderr.removeprefix("rank 0 complains\n").strip()
    assert shown.startswith(start)
    assert shown.endswith(end)
    assert "gloo" not in shown and "torch/distributed" not in shown


@pytest.mark.slow
def test_processes_that_are_started_again_go_on_from_the_last_checkpoint(own: Path) -> None:
    done = tune(*RUN, "--max_restarts", "1", *COMMAND, "does=fail once", cwd=own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("resumed: True\n")


@pytest.fixture
def waiting(own: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run whose processes wait for a minute."""
    with subprocess.Popen(
        [sys.executable, "-m", "checkpointing", *RUN, *COMMAND, "does=wait"],
        cwd=own,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Not ignored, as a shell has it for what it runs in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "waits\n":
            assert process.poll() is None, process.communicate()
        yield process
        process.kill()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_and_is_the_exit_code(
    waiting: "subprocess.Popen[str]", number: signal.Signals
) -> None:
    workers = children(waiting.pid)
    assert len(workers) == 2
    waiting.send_signal(number)
    _, shown = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + number
    assert re.fullmatch(
        rf"rank 0 complains\n\n{number.name}: interrupted before the first checkpoint; start again "
        r"with: tune run --nproc_per_node 2 recipe\.py --config config\.yaml does=wait\n",
        shown,
    ), shown
    assert not any(map(lives, workers))


def test_no_process_outlives_the_command(waiting: "subprocess.Popen[str]") -> None:
    workers = children(waiting.pid)
    assert len(workers) == 2
    waiting.kill()
    until = time.monotonic() + 30
    while any(map(lives, workers)):
        assert time.monotonic() < until
        time.sleep(0.05)


def children(process: int) -> list[int]:
    """Processes that another one has started and that have not ended."""
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(number) for number in listed.split()]


def lives(process: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["lora_finetune_distributed", "--config", "smollm2/135M_lora_distributed"],
            "tune run --nproc_per_node <NUMBER> lora_finetune_distributed --config "
            "smollm2/135M_lora_distributed",
        ),
        (
            [
                *("--nproc_per_node", "2", "lora_finetune_single_device"),
                *("--config", "smollm2/135M_lora_single_device"),
            ],
            "leave out --nproc_per_node 2; for several there is lora_finetune_distributed",
        ),
        (["--nproc-per-node", "many", *COMMAND], "--nproc_per_node many: Unsupported"),
        (["--nproc_per_node", "0", *COMMAND], "--nproc_per_node 0: must be at least 1"),
        (["--nnodes", "1:x", *COMMAND], "--nnodes 1:x: is no number of machines"),
        (
            ["--nproc_per_node", "2", "--log_dir", "config.yaml/logs", *COMMAND],
            "config.yaml/logs: cannot be made",
        ),
    ],
)
def test_a_command_that_cannot_be_right_is_an_error_with_the_right_one(
    own: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(own)
    environment_before = dict(os.environ)
    assert main(["run", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert dict(os.environ) == environment_before


def test_the_help_shows_the_options_of_many_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["run", "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--nproc_per_node", "--nnodes", "--rdzv_endpoint", "--max_restarts"):
        assert option in shown
