"""SIGTERM and SIGINT, and saves that the system refuses, in real runs."""

import errno
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from checkpointing import FullModelHFCheckpointer
from checkpointing.cli.main import main
from checkpointing.errors import ConfigError, WriteError
from checkpointing.storage.writer import CheckpointWriter
from checkpointing.training import DiskLogger, TrainingOptions
from tests.cli.command import environment
from tests.training import runs
from tests.training.runs import checkpoints, metrics, recipe_config, run, same, weights

RECIPES = {"lora": "lora_finetune_single_device", "full": "full_finetune_single_device"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


class SlowLogger(DiskLogger):
    """Logs to disk, says which step was done, and lets a signal come before it goes on."""

    def __init__(self, log_dir, pause=0.3):
        super().__init__(log_dir)
        self._pause = pause

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        print(f"step {step}", flush=True)
        time.sleep(self._pause)


class RefusingLogger(DiskLogger):
    """Lets the disk refuse checkpoints after one step, until another."""

    refuses = False

    def __init__(self, log_dir, first, last):
        super().__init__(log_dir)
        self._changes = {first: True, last: False}

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        RefusingLogger.refuses = self._changes.get(step, RefusingLogger.refuses)


class SlowCheckpointer(FullModelHFCheckpointer):
    """Says that it saves, and takes its time."""

    def save_checkpoint(self, *args, **kwargs):
        print("saving", flush=True)
        time.sleep(0.5)
        return super().save_checkpoint(*args, **kwargs)


@pytest.fixture
def refusing_disk(monkeypatch):
    """A limit of the system itself would hold for the files of the test runner too."""
    monkeypatch.setattr(RefusingLogger, "refuses", False)
    original = CheckpointWriter.torch_object

    def torch_object(self, name, content):
        if RefusingLogger.refuses:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self.directory / name))
        original(self, name, content)

    monkeypatch.setattr(CheckpointWriter, "torch_object", torch_object)


# Signals


def start(kind, base, out, *overrides):
    """Starts a run of two epochs, 8 steps, in a process of its own."""
    recipe_config(kind, base, out)
    logger = "metric_logger=tests.training.test_stopping.SlowLogger"
    command = ["run", RECIPES[kind], "--config", str(out / "recipe.yaml"), logger, *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "checkpointing", *command],
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


def finished(process):
    """Exit code and what it said, within a minute."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


@pytest.mark.parametrize(
    ("kind", "number", "code"),
    [
        ("lora", signal.SIGTERM, 143),
        pytest.param("full", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_gets_a_signal_saves_and_goes_on_bit_for_bit(base, tmp_path, kind, number, code):
    uninterrupted = tmp_path / "whole"
    run(kind, base, uninterrupted)
    stopped = tmp_path / "stopped"
    process = start(kind, base, stopped)
    wait_for(process, "step 2")
    process.send_signal(number)
    sent = time.monotonic()
    returned, said = finished(process)
    assert time.monotonic() - sent < 30
    assert returned == code, said
    assert f"{number.name}: stops when this step is done and saved" in said
    assert "Traceback" not in said
    (name,) = checkpoints(stopped)
    # The step that ran was finished, and no other begun.
    assert name in ("step_2", "step_3")
    assert len(metrics(stopped)) == int(name.removeprefix("step_"))
    (command,) = re.findall(r"go on from the last checkpoint with: tune (.*)\n", said)
    assert command.endswith("resume_from_checkpoint=True")
    assert main(command.split()) == 0
    assert metrics(stopped) == metrics(uninterrupted)
    assert same(weights(stopped / "epoch_1"), weights(uninterrupted / "epoch_1"))


def test_a_second_signal_stops_at_once_without_saving(base, tmp_path):
    # A step is followed by a wait, as if it took long.
    process = start("lora", base, tmp_path, "+metric_logger.pause=60")
    wait_for(process, "step 1")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    returned, _ = finished(process)
    assert returned == -signal.SIGTERM
    assert checkpoints(tmp_path) == set()


def test_two_signals_at_once_are_one_request(base, tmp_path):
    process = start("lora", base, tmp_path, "+metric_logger.pause=0.5")
    wait_for(process, "step 1")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == 143
    assert len(checkpoints(tmp_path)) == 1


def test_a_run_ends_at_its_deadline_whatever_it_does(base, tmp_path):
    process = start("lora", base, tmp_path, "+metric_logger.pause=60", "stop_deadline_seconds=1")
    wait_for(process, "step 1")
    process.send_signal(signal.SIGINT)
    returned, said = finished(process)
    assert returned == 130
    assert "SIGINT: not done after 1 seconds" in said
    assert "resume_from_checkpoint=True" in said


def test_a_signal_in_the_last_step_lets_the_run_end_as_it_would(base, tmp_path):
    process = start("lora", base, tmp_path, "epochs=1")
    wait_for(process, "step 4")
    process.send_signal(signal.SIGTERM)
    returned, said = finished(process)
    assert returned == 0
    assert f"Checkpoint: {tmp_path}/epoch_0" in said


def test_a_save_that_runs_when_the_signal_comes_is_completed(base, tmp_path):
    component = "checkpointer=tests.training.test_stopping.SlowCheckpointer"
    process = start("lora", base, tmp_path, component, "save_every_n_steps=3")
    wait_for(process, "saving")
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == 143
    assert checkpoints(tmp_path) == {"step_3"}
    assert sorted(metrics(tmp_path)) == [1, 2, 3]


def test_a_signal_at_the_end_of_an_epoch_saves_just_the_epoch(base, tmp_path):
    process = start("lora", base, tmp_path)
    wait_for(process, "step 4")
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == 143
    assert checkpoints(tmp_path) == {"epoch_0"}


def test_a_signal_that_is_ignored_stays_ignored_and_handlers_are_put_back(base, tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runs.run("lora", base, tmp_path, "epochs=1")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before[0]
    finally:
        signal.signal(signal.SIGINT, before[1])


# Saves that the system refuses

LIMITED = (
    "metric_logger=tests.training.test_stopping.RefusingLogger",
    "save_every_n_steps=1",
    "save_adapter_weights_only=True",
)


def limited(first, last):
    return (*LIMITED, f"+metric_logger.first={first}", f"+metric_logger.last={last}")


def test_a_save_that_the_system_refuses_ends_the_run(base, tmp_path, refusing_disk):
    with pytest.raises(WriteError, match=r"step_2: could not be saved: File too large"):
        run("lora", base, tmp_path, *limited(2, 9))
    assert checkpoints(tmp_path) == {"step_1"}
    assert sorted(metrics(tmp_path)) == [1, 2]


def test_a_run_goes_on_without_it_if_it_is_told_to(base, tmp_path, refusing_disk, caplog):
    run("lora", base, tmp_path / "whole", "save_adapter_weights_only=True")
    run("lora", base, tmp_path / "out", *limited(2, 4), "on_save_error=continue")
    # Steps 2 and 3 could not be saved; 4 is the end of the first epoch.
    assert checkpoints(tmp_path / "out") == {
        *("step_1", "epoch_0", "step_5", "step_6", "step_7", "epoch_1")
    }
    assert metrics(tmp_path / "out") == metrics(tmp_path / "whole")
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2
    assert "NOT SAVED" in said[0]
    assert "step_2: could not be saved: File too large" in said[0]
    assert not list((tmp_path / "out").glob(".*saving*"))


def test_the_last_save_of_a_run_must_succeed(base, tmp_path, refusing_disk):
    with pytest.raises(WriteError, match="epoch_1: could not be saved"):
        run("lora", base, tmp_path, *limited(7, 99), "on_save_error=continue")
    assert "step_6" in checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on_save_error": "ignore"}, "on_save_error=ignore: there are continue, stop"),
        ({"stop_deadline_seconds": 0}, "stop_deadline_seconds=0: must be above 0"),
    ],
)
def test_impossible_options_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        TrainingOptions(epochs=1, seed=0, **change)
