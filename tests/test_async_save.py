"""Saves in the background: what they hold, what they cost, and what happens when they fail."""

import errno
import json
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch

from checkpointing import AsyncCheckpointer, MergedStateDict
from checkpointing.errors import CheckpointingError, ConfigError, OutOfSpaceError
from checkpointing.storage import writer
from checkpointing.verify import verify
from tests.test_checkpointers import ADAPTER, CLASSES, CONFIG, adapter_state, make, write_base
from tests.tiny import assert_same_tensors, random_adapter


@pytest.fixture(params=CLASSES)
def name(request):
    return request.param


@pytest.fixture
def base(tmp_path, name):
    write_base(tmp_path / "base", name)
    return tmp_path / "base"


def trained_state(weights, **more):
    optimizer = {"state": {0: {"exp_avg": torch.full((50,), 2.0), "step": torch.tensor(3.0)}}}
    return {"model": {n: t.clone() for n, t in weights.items()}, "optimizer": optimizer, **more}


def tensors_of(state):
    return [*state["model"].values(), *state["optimizer"]["state"][0].values()]


def isolated_saves(name, base, count):
    """Saves and changes everything at once, again and again; no change may reach a file."""
    saver = AsyncCheckpointer(make(name, base))
    weights = make(name, base).load_checkpoint()["model"]
    state = trained_state(weights, steps_run=0)
    for number in range(count):
        for tensor in tensors_of(state):
            tensor.fill_(number)
        state["steps_run"] = number
        saved = saver.save_checkpoint(state, epoch=0)
        for tensor in tensors_of(state):
            tensor.fill_(-1)
        saver.wait()
        found = make(name, base, should_load_recipe_state=str(saved)).load_checkpoint()
        for tensor in tensors_of(found):
            assert (tensor == number).all()
        assert found["steps_run"] == number


def test_what_changes_after_a_save_has_returned_never_reaches_the_file(name, base):
    isolated_saves(name, base, 8)


@pytest.mark.slow
def test_a_thousand_saves_are_all_isolated(tmp_path):
    write_base(tmp_path / "base", "tune")
    isolated_saves("tune", tmp_path / "base", 1000)


def test_it_writes_what_a_plain_save_writes(tmp_path, name, base):
    weights = make(name, base).load_checkpoint()["model"]
    state = adapter_state(weights, steps_run=4)
    plain = make(name, base)
    saver = AsyncCheckpointer(make(name, base))
    with saver.claim_output_dir():
        saver.check_save(state)
        saved = saver.save_checkpoint(state, epoch=1)
    expected = plain.save_checkpoint(state, epoch=2)
    files = [
        json.loads((directory / "manifest.json").read_text())["files"]
        for directory in (saved, expected)
    ]
    assert files[0] == files[1]
    assert not verify(saved).problems


def test_dictionaries_of_every_kind_stay_what_they_are(tmp_path):
    write_base(tmp_path / "base", "tune")
    weights = make("tune", tmp_path / "base").load_checkpoint()["model"]
    saver = AsyncCheckpointer(make("tune", tmp_path / "base"))
    kinds = {"milestones": Counter({5: 1}), "ordered": OrderedDict(rate=torch.tensor(0.5))}
    saved = saver.save_checkpoint({"model": weights, **kinds}, epoch=0)
    saver.wait()
    found = torch.load(saved / "recipe_state.pt", weights_only=True)
    assert found == kinds
    assert {key: type(value) for key, value in found.items()} == {
        "milestones": Counter,
        "ordered": OrderedDict,
    }


def test_an_adapter_run_copies_its_adapter_and_not_its_base(name, base):
    weights = make(name, base).load_checkpoint()["model"]
    adapter = random_adapter(CONFIG.dims, ADAPTER)
    saver = AsyncCheckpointer(make(name, base))
    saver.check_save(adapter_state(weights, adapter))
    copied = sum(buffer.nbytes for buffer in saver._buffers.values())
    assert copied == sum(tensor.nbytes for tensor in adapter.values())


def test_the_adapter_of_a_merged_save_is_that_of_the_moment(base, name):
    weights = make(name, base).load_checkpoint()["model"]
    adapter = random_adapter(CONFIG.dims, ADAPTER)
    merged = dict(MergedStateDict(weights, {n: t.clone() for n, t in adapter.items()}, ADAPTER))
    saver = AsyncCheckpointer(make(name, base))
    saved = saver.save_checkpoint(adapter_state(weights, adapter, steps_run=1), epoch=0)
    for tensor in adapter.values():
        tensor.fill_(7)
    saver.wait()
    directory = saved / "merged" if name == "hf" else saved
    if name == "meta":
        (directory / "params.json").write_bytes((base / "params.json").read_bytes())
    assert_same_tensors(CLASSES[name](directory).load_checkpoint()["model"], merged)


def test_buffers_are_made_once(name, base):
    weights = make(name, base).load_checkpoint()["model"]
    saver = AsyncCheckpointer(make(name, base))
    state = trained_state(weights)
    saver.check_save(state)
    places = {path: buffer.data_ptr() for path, buffer in saver._buffers.items()}
    for epoch in range(3):
        saver.save_checkpoint(state, epoch=epoch)
    saver.wait()
    assert {path: buffer.data_ptr() for path, buffer in saver._buffers.items()} == places


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing waits until it is let go."""
    gate = threading.Event()
    original = writer.CheckpointWriter.manifest

    def manifest(self, facts):
        assert gate.wait(30)
        original(self, facts)

    monkeypatch.setattr(writer.CheckpointWriter, "manifest", manifest)
    return gate


def test_the_trainer_goes_on_while_a_save_is_written_and_the_next_save_waits(tmp_path, slow_disk):
    write_base(tmp_path / "base", "tune")
    weights = make("tune", tmp_path / "base").load_checkpoint()["model"]
    saver = AsyncCheckpointer(make("tune", tmp_path / "base"))
    state = trained_state(weights)
    first = saver.save_checkpoint(state, epoch=0)
    saver.wait(block=False)
    assert not first.exists(), "not there before it is complete"
    threading.Timer(0.4, slow_disk.set).start()
    started = time.perf_counter()
    saver.save_checkpoint(state, epoch=1)
    assert time.perf_counter() - started > 0.3 and first.exists()
    saver.wait()
    assert saver.times.blocked > 0.3 and saver.times.written > 0


def test_an_error_is_raised_at_the_next_step_and_not_lost_at_the_end(tmp_path, monkeypatch):
    write_base(tmp_path / "base", "tune")
    weights = make("tune", tmp_path / "base").load_checkpoint()["model"]
    saver = AsyncCheckpointer(make("tune", tmp_path / "base"))
    state = trained_state(weights)
    before = saver.save_checkpoint(state, epoch=0)
    saver.wait()

    def full(self, facts):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.CheckpointWriter, "manifest", full)
    saver.save_checkpoint(state, epoch=1)
    deadline = time.monotonic() + 30
    with pytest.raises(OutOfSpaceError):
        while time.monotonic() < deadline:
            saver.wait(block=False)
            time.sleep(0.01)
    with pytest.raises(OutOfSpaceError), saver.claim_output_dir():
        saver.save_checkpoint(state, epoch=2)
    assert [path.name for path in before.parent.iterdir()] == ["epoch_0"]
    assert not verify(before).problems
    monkeypatch.undo()
    saver.save_checkpoint(state, epoch=3)
    saver.wait()


def test_an_exception_in_training_waits_for_the_save_that_is_being_written(tmp_path, slow_disk):
    write_base(tmp_path / "base", "tune")
    weights = make("tune", tmp_path / "base").load_checkpoint()["model"]
    saver = AsyncCheckpointer(make("tune", tmp_path / "base"))
    threading.Timer(0.3, slow_disk.set).start()
    with pytest.raises(KeyboardInterrupt), saver.claim_output_dir():
        saved = saver.save_checkpoint(trained_state(weights), epoch=0)
        raise KeyboardInterrupt
    assert not verify(saved).problems


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    write_base(tmp_path / "base", "tune")
    saver = AsyncCheckpointer(make("tune", tmp_path / "base"))
    with pytest.raises(ConfigError, match="'model'"):
        saver.save_checkpoint({}, epoch=0)
    with pytest.raises(CheckpointingError, match="dir_prefix"):
        saver.save_checkpoint({}, epoch=0, dir_prefix="step")


ENDING_PROGRAM = """
import sys
from checkpointing import AsyncCheckpointer
from tests.test_async_save import trained_state
from tests.test_checkpointers import make
from pathlib import Path
base = Path(sys.argv[1])
weights = make("hf", base).load_checkpoint()["model"]
print(AsyncCheckpointer(make("hf", base)).save_checkpoint(trained_state(weights), epoch=0))
"""


def test_the_end_of_the_program_waits_for_the_save(tmp_path):
    write_base(tmp_path / "base", "hf")
    command = [sys.executable, "-c", ENDING_PROGRAM, str(tmp_path / "base")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    saved = Path(done.stdout.strip())
    assert verify(saved).problems == ()
    weights = make("hf", tmp_path / "base").load_checkpoint()["model"]
    found = make("hf", tmp_path / "base", should_load_recipe_state=str(saved)).load_checkpoint()
    assert_same_tensors(found["model"], weights)
