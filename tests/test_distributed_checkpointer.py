"""Distributed checkpoints: what is loaded is what was saved, by however many processes."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointing import FullModelHFCheckpointer, dcp_write
from checkpointing.cli.main import main as tune
from checkpointing.dcp_metadata import read_metadata
from checkpointing.distributed_checkpointer import DistributedCheckpointer
from checkpointing.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    OutOfSpaceError,
    RankLostError,
    TensorMismatchError,
    UnsafePathError,
    WriteError,
)
from checkpointing.storage import commit
from checkpointing.verify import verify
from tests import dcp_worker as worker
from tests.crash.hooks import Recorder, watching
from tests.crash.watchers import Faulty, Killer
from tests.hostile.harness import cases, fuzz, survives
from tests.hostile.mutations import damaged
from tests.sharded_worker import Job
from tests.test_checkpointers import write_base

# torch says so each time that there is one process alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def job(request, tmp_path_factory):
    job = Job(request.param, tmp_path_factory.mktemp("job"))
    yield job
    job.stop()


@pytest.fixture(scope="module")
def other_job(tmp_path_factory):
    """Of another number of processes than any other job."""
    job = Job(3, tmp_path_factory.mktemp("other"))
    yield job
    job.stop()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def check_same(found, expected, path=""):
    """The same values, bit for bit, of the same types, under the same keys."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
    if isinstance(expected, dict | list | tuple):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        assert len(found) == len(expected), path
        for key in keys:
            check_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), path
    else:
        assert found == expected, path


def raised(answers, kind, match):
    """All processes have raised such an error; returns the messages."""
    assert all(issubclass(found, kind) for found, _ in answers), answers
    assert all(match in message for _, message in answers), answers
    return [message for _, message in answers]


# Layouts of the job that saves and of the one that loads; one process has no layout.
@pytest.mark.parametrize("plain", [True, False], ids=["own state", "named state"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("saved", ["fsdp", "tensor parallel", "fsdp over tensor parallel"])
def test_what_many_save_one_and_many_in_another_layout_load(job, out, saved, dtype, plain):
    expected, *_ = job.run(worker.save, out=out, layout=saved, dtype=dtype, plain=plain, seed=3)
    assert not verify(out / "epoch_0").problems
    alone = worker.load(out, "whole", dtype, plain)
    check_same(alone, expected)
    for layout in ("fsdp", "tensor parallel", "fsdp over tensor parallel"):
        if layout != saved:
            answers = job.run(worker.load, out=out, layout=layout, dtype=dtype, plain=plain)
            for answer in answers:
                check_same(answer, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_one_saves_many_load(job, out, dtype):
    expected = worker.save(out, "whole", dtype, True, seed=3)
    for answer in job.run(worker.load, out=out, layout="fsdp", dtype=dtype, plain=True):
        check_same(answer, expected)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False], ids=["own state", "named state"])
@pytest.mark.parametrize("layout", ["fsdp", "tensor parallel"])
def test_another_number_of_processes_loads_it(job, other_job, out, layout, plain):
    arguments = {"out": out, "dtype": torch.bfloat16, "plain": plain}
    expected, *_ = job.run(worker.save, layout="fsdp", seed=3, **arguments)
    for answer in other_job.run(worker.load, layout=layout, **arguments):
        check_same(answer, expected)
    expected, *_ = other_job.run(worker.save, layout=layout, seed=4, epoch=1, **arguments)
    for answer in job.run(worker.load, layout="fsdp over tensor parallel", **arguments):
        check_same(answer, expected)


def test_torch_itself_reads_what_was_saved(job, out):
    expected, *_ = job.run(
        worker.save, out=out, layout="fsdp", dtype=torch.float32, plain=True, seed=3
    )
    state = worker.state_of(*worker.built("whole", torch.float32, 5), True, 5)
    del state["optimizer"], state["run"]
    dcp.load(state, checkpoint_id=out / "epoch_0")
    check_same(worker.whole(state), {key: expected[key] for key in state})


def test_what_torch_itself_has_saved_is_read(out, tmp_path):
    state = worker.state_of(*worker.built("whole", torch.bfloat16, 3), True, 3)
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    found = worker.state_of(*worker.built("whole", torch.bfloat16, 5), True, 5)
    DistributedCheckpointer(out, out).load_checkpoint(found, tmp_path / "theirs")
    check_same(worker.whole(found), worker.whole(state))


def test_nothing_of_the_state_is_changed_by_a_save(out):
    state = worker.state_of(*worker.built("whole", torch.float32, 3), True, 3)
    before = worker.whole(state)
    DistributedCheckpointer(out, out).save_checkpoint(state, epoch=0)
    check_same(worker.whole(state), before)


def test_keys_and_values_of_all_kinds_come_back(out):
    state = {
        "by number": {0: {"momentum_buffer": None}, 1: {"momentum_buffer": torch.ones(3)}},
        "list": [{"a": torch.arange(5)}, {"a": torch.zeros(()), "text": "ä\n"}],
        "tuple": (1, 2.5, "x", None, torch.ones(2)),
        "nothing": {},
        "empty": [],
        "none of its elements": torch.zeros(0, 7),
        "dtype": torch.bfloat16,
        "bytes": b"\x00\xff",
    }
    DistributedCheckpointer(out, out).save_checkpoint(state, epoch=0)
    found = {
        "by number": {0: {"momentum_buffer": 3}, 1: {"momentum_buffer": torch.zeros(3)}},
        "list": [{"a": torch.zeros(5, dtype=torch.int64)}, {"a": torch.ones(()), "text": ""}],
        "tuple": None,
        "nothing": {},
        "empty": [1],
        "none of its elements": torch.zeros(0, 7),
        "dtype": None,
        "bytes": b"",
    }
    check_same(DistributedCheckpointer(out, out).load_checkpoint(found), state)


def test_a_part_of_the_state_can_be_loaded_alone(out):
    expected = worker.save(out, "whole", torch.float32, True, seed=3)
    model = worker.Net()
    DistributedCheckpointer(out, out).load_checkpoint({"model": model.state_dict()})
    check_same(worker.whole(model.state_dict()), expected["model"])


def test_what_a_schedule_has_added_is_put_where_it_belongs(out):
    model, optimizer = worker.built("whole", torch.float32, 3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    state = worker.state_of(model, optimizer, True, 3)
    assert "initial_lr" in state["optimizer"]["param_groups"][0]
    expected = worker.whole(state)
    DistributedCheckpointer(out, out).save_checkpoint(state, epoch=0)
    check_same(worker.load(out, "whole", torch.float32, True), expected)


def test_what_differs_between_processes_is_that_of_the_first(job, out):
    for rank, answer in enumerate(job.run(worker.save_each_its_own, out=out)):
        expected = {"number": 0, "tensor": torch.zeros(3, dtype=torch.int64)}
        check_same(answer, {**expected, f"rank {rank}": {"own": rank + 7}})


def test_a_part_of_a_job_can_save_alone(job, out):
    names = job.run(worker.save_by_a_part_of_the_job, out=out)
    assert names == [[".metadata", "__0_0.distcp", "manifest.json"]] * len(job)


# In the background


@pytest.mark.parametrize("layout", ["fsdp", "tensor parallel"])
def test_what_changes_after_a_save_has_returned_never_reaches_the_files(job, out, layout):
    expected, *_ = job.run(worker.save_and_change, out=out, layout=layout, count=4)
    assert all(not verify(out / f"step_{step}").problems for step in range(4))
    for answer in job.run(worker.load_steps, out=out, layout="fsdp", count=4):
        check_same(answer, expected)


def test_the_next_save_waits_and_wait_tells_the_times(out, monkeypatch):
    checkpointer = DistributedCheckpointer(out, out)
    slow = commit.sync_tree
    monkeypatch.setattr(commit, "sync_tree", lambda path: (time.sleep(0.4), slow(path)))
    first = checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=0, save_async=True)
    assert not first.exists(), "not there before it is complete"
    checkpointer.wait(block=False)
    started = time.perf_counter()
    second = checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=1)
    assert time.perf_counter() - started > 0.7 and first.exists() and second.exists()
    checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=2, save_async=True)
    with checkpointer.claim_output_dir():
        pass
    assert checkpointer.times.blocked < 0.3 < checkpointer.times.written


def test_an_error_in_the_background_is_raised_at_the_next_save(out, tmp_path, caplog):
    checkpointer = DistributedCheckpointer(out, out)
    checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=0)
    with watching(out, Faulty(28, 4, lasting=True)):
        checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=1, save_async=True)
        with pytest.raises(OutOfSpaceError, match="epoch_1"):
            checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=2)
    assert "could not be saved in the background" in caplog.text
    DistributedCheckpointer(out, out)
    assert [path.name for path in out.iterdir()] == ["epoch_0"]
    checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=3)


def test_the_end_of_the_program_waits_for_the_save(out):
    code = (
        "import sys, time, torch\n"
        "from checkpointing.storage import commit\n"
        "from checkpointing.distributed_checkpointer import DistributedCheckpointer\n"
        "slow = commit.sync_tree\n"
        "commit.sync_tree = lambda path: (time.sleep(0.5), slow(path))\n"
        "saver = DistributedCheckpointer(sys.argv[1], sys.argv[1])\n"
        "print(saver.save_checkpoint({'a': torch.ones(3)}, epoch=0, save_async=True).exists())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(out)], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr
    assert not verify(out / "epoch_0").problems


# Adapters


def test_an_adapter_is_saved_beside_the_rest_and_loaded_alone(out):
    checkpointer = DistributedCheckpointer(out, out)
    whole = {"model": {"weight": torch.randn(5, 3)}, "steps_run": 7}
    adapter = {"lora_a": torch.randn(2, 3), "lora_b": torch.randn(5, 2)}
    checkpointer.save_checkpoint(adapter, epoch=1, adapter_only=True, step=7)
    assert checkpointer.get_latest_checkpoint() is None
    saved = checkpointer.save_checkpoint(whole, epoch=1)
    assert saved == checkpointer.get_output_path(1) == checkpointer.get_latest_checkpoint()
    newer = {name: one + 1 for name, one in adapter.items()}
    checkpointer.save_checkpoint(newer, epoch=1, adapter_only=True)
    verified = verify(saved)
    assert verified.files == 4 and not verified.problems
    found = {name: torch.zeros_like(one) for name, one in adapter.items()}
    check_same(checkpointer.load_checkpoint(found, adapter_only=True), newer)
    found = {"model": {"weight": torch.zeros(5, 3)}, "steps_run": 0}
    check_same(checkpointer.load_checkpoint(found), whole)
    assert json.loads((saved / "manifest.json").read_text())["step"] == 7


def test_another_runs_adapter_is_not_kept_beside_new_weights(out):
    adapter = {"lora_a": torch.randn(2, 3)}
    DistributedCheckpointer(out, out).save_checkpoint(adapter, epoch=0, adapter_only=True)
    saved = DistributedCheckpointer(out, out).save_checkpoint({"a": torch.ones(3)}, epoch=0)
    assert not (saved / "adapter_model").exists()


def test_a_runs_own_adapter_is_kept_where_another_run_had_saved_before(out):
    DistributedCheckpointer(out, out).save_checkpoint({"a": torch.ones(3)}, epoch=0, step=90)
    checkpointer = DistributedCheckpointer(out, out)
    adapter, found = {"lora_a": torch.randn(2, 3)}, {"lora_a": torch.zeros(2, 3)}
    checkpointer.save_checkpoint(adapter, epoch=0, step=4, adapter_only=True)
    checkpointer.save_checkpoint({"a": torch.zeros(3)}, epoch=0, step=4)
    check_same(checkpointer.load_checkpoint(found, adapter_only=True), adapter)
    check_same(checkpointer.load_checkpoint({"a": torch.ones(3)}), {"a": torch.zeros(3)})
    assert not verify(out / "epoch_0").problems


def test_an_adapter_keeps_what_lies_in_a_directory_of_others(out):
    (out / "epoch_0" / "deep").mkdir(parents=True)
    (out / "epoch_0" / "deep" / "notes.txt").write_text("mine")
    (out / "epoch_0" / "training_progress.pt").write_bytes(b"theirs")
    saved = DistributedCheckpointer(out, out).save_checkpoint(
        {"lora_a": torch.randn(2, 3)}, epoch=0, adapter_only=True
    )
    assert (saved / "deep" / "notes.txt").read_text() == "mine"
    assert (saved / "training_progress.pt").read_bytes() == b"theirs"
    assert not verify(saved).problems


def test_an_adapter_does_not_hide_that_the_rest_is_damaged(out):
    checkpointer = DistributedCheckpointer(out, out)
    saved = checkpointer.save_checkpoint({"a": torch.ones(3)}, epoch=0)
    (saved / "__0_0.distcp").unlink()
    checkpointer.save_checkpoint({"lora_a": torch.randn(2, 3)}, epoch=0, adapter_only=True)
    assert "__0_0.distcp: is missing" in verify(saved).problems[0]


# Which one is the latest, and what is refused


def test_the_latest_is_the_complete_one_with_most_steps(out, tmp_path):
    checkpointer = DistributedCheckpointer(out, out)
    for step, prefix in ((900, "step"), (20, "step"), (100, "epoch")):
        state = {"step": torch.tensor(step)}
        checkpointer.save_checkpoint(state, epoch=0, step=step, dir_prefix=prefix)
    assert checkpointer.get_latest_checkpoint() == out / "step_900"
    # Neither what has no manifest nor what lacks a file counts.
    shutil.copytree(out / "step_900", out / "step_901")
    (out / "step_901" / "manifest.json").unlink()
    (out / "step_900" / "__0_0.distcp").unlink()
    assert checkpointer.get_latest_intermediate_checkpoint() == out / "epoch_0"
    found = checkpointer.load_checkpoint({"step": torch.tensor(0)})
    assert found["step"] == 100


def test_it_is_nothing_that_another_checkpointer_resumes_from(out, tmp_path):
    write_base(tmp_path / "base", "hf")
    weights = FullModelHFCheckpointer(tmp_path / "base").load_checkpoint()["model"]
    saver = FullModelHFCheckpointer(tmp_path / "base", output_dir=out)
    own = saver.save_checkpoint({"model": weights, "steps_run": 3}, epoch=0)
    newer = DistributedCheckpointer(out, out).save_checkpoint({"steps_run": 5}, epoch=1)
    arguments = {"checkpoint_dir": tmp_path / "base", "output_dir": out}
    resumed = FullModelHFCheckpointer(**arguments, should_load_recipe_state=True)
    assert resumed.load_checkpoint()["steps_run"] == 3
    with pytest.raises(ConfigError, match="was saved by DistributedCheckpointer"):
        FullModelHFCheckpointer(**arguments, should_load_recipe_state=str(newer))
    assert own != newer


def test_no_checkpoint(out):
    checkpointer = DistributedCheckpointer(out, out)
    for arguments in ({}, {"adapter_only": True}, {"checkpoint_path": out / "epoch_0"}):
        with pytest.raises(CheckpointNotFoundError, match=str(out)):
            checkpointer.load_checkpoint({"a": torch.ones(3)}, **arguments)
    with pytest.raises(ConfigError, match="state_dict"):
        checkpointer.load_checkpoint()


def test_damage_is_found_by_name_before_anything_is_loaded(job, out, capsys):
    job.run(worker.save, out=out, layout="fsdp", dtype=torch.float32, plain=True, seed=3)
    saved = out / "epoch_0"
    places = read_metadata(saved).storage_data
    place = next(place for index, place in places.items() if index.fqn == "model.up.weight")
    file = saved / place.relative_path
    content = bytearray(file.read_bytes())
    content[place.offset + place.length // 2] ^= 1
    file.write_bytes(content)
    assert tune(["verify", str(saved)]) == 1
    assert "model.up.weight" in capsys.readouterr().out
    model, optimizer = worker.built("whole", torch.float32, 5)
    state = worker.state_of(model, optimizer, True, 5)
    before = worker.whole(state)
    with pytest.raises(CorruptCheckpointError, match=rf"{place.relative_path}.*model\.up\.weight"):
        DistributedCheckpointer(out, out).load_checkpoint(state)
    check_same(worker.whole(state), before)
    answers = job.run(worker.load, out=out, layout="fsdp", dtype=torch.float32, plain=True)
    raised(answers, CorruptCheckpointError, "model.up.weight")


def test_many_small_tensors_share_lines_of_the_manifest(out, monkeypatch):
    monkeypatch.setattr(dcp_write, "_MOST_PARTS", 5)
    monkeypatch.setattr(dcp_write, "_RANGE", 4000)
    state = {f"tensor {number}": torch.randn(number) for number in range(1, 9)}
    saved = DistributedCheckpointer(out, out).save_checkpoint(state, epoch=0)
    lines = json.loads((saved / "manifest.json").read_text())["files"]["__0_0.distcp"]["xxh3_64"]
    assert 2 < len(lines) < 6 and not verify(saved).problems
    content = bytearray((saved / "__0_0.distcp").read_bytes())
    content[-1] ^= 1
    (saved / "__0_0.distcp").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp: is damaged"):
        DistributedCheckpointer(out, out).load_checkpoint(dict(state))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_truncated_or_missing_file_is_named(out, name):
    saved = DistributedCheckpointer(out, out).save_checkpoint({"a": torch.randn(9)}, epoch=0)
    (saved / "manifest.json").unlink()
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[:-100])
    with pytest.raises(CorruptCheckpointError, match=name):
        DistributedCheckpointer(out, out).load_checkpoint({"a": torch.zeros(9)}, saved)
    (saved / name).unlink()
    with pytest.raises(CheckpointNotFoundError, match=name):
        DistributedCheckpointer(out, out).load_checkpoint({"a": torch.zeros(9)}, saved)


def test_all_that_does_not_fit_is_listed_and_nothing_is_loaded(out):
    saved = {
        "model": {"a": torch.ones(3, 5), "b": torch.ones(2), "c": 1, "d": torch.ones(6), "e": 2},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}},
    }
    DistributedCheckpointer(out, out).save_checkpoint(saved, epoch=0)
    state = {
        "model": {
            "a": torch.zeros(5, 3),
            "b": torch.zeros(2, dtype=torch.bfloat16),
            "c": torch.zeros(1),
            "d": 0.5,
            "e": 9,
            "f": torch.zeros(7),
            "g": torch.zeros(8, device="meta"),
        },
        "optimizer": {"state": {}},
    }
    with pytest.raises(TensorMismatchError, match=r"epoch_0: 7 problems") as caught:
        DistributedCheckpointer(out, out).load_checkpoint(state)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        *(f"model.{name}" for name in "abcdfg"),
        "optimizer.state.0.exp_avg",
    ]
    assert "[3, 5] in the checkpoint, here [5, 3]" in str(caught.value)
    assert "torch.float32 in the checkpoint, here torch.bfloat16" in str(caught.value)
    assert "get_optimizer_state_dict" in str(caught.value)
    assert state["model"]["e"] == 9 and not state["model"]["b"].any()


class Odd:
    """No data."""


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": {"b": Odd()}}, r"a\.b.*Odd"),
        ({"a": {"b": torch.ones(2)}, "a.b": torch.ones(3)}, r"a\.b"),
        ({"a": torch.eye(3).to_sparse()}, r"a is a Tensor \(torch.sparse_coo"),
        ({"a": torch.ones(3, device="meta")}, r"a is a Tensor .*on meta"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(out, state, match):
    with pytest.raises(ConfigError, match=match):
        DistributedCheckpointer(out, out).save_checkpoint(state, epoch=0)
    assert not out.exists()


def test_summands_are_refused(job, out):
    raised(job.run(worker.save_sums, out=out), ConfigError, "model.sum")
    assert not out.exists()


def test_an_unsaveable_value_in_one_process_fails_all(job, out):
    values = [Odd if rank == 1 else 3 for rank in range(len(job))]
    messages = raised(job.run(worker.save_value, values, out=out), ConfigError, "value")
    assert messages[0].startswith("rank 1: ")


def test_processes_that_save_different_checkpoints_are_refused(job, out):
    answers = job.run(_save_of_epoch, list(range(len(job))), out=out)
    raised(answers, ConfigError, "the checkpoint's name is 'epoch_0' on rank 0")


def _save_of_epoch(epoch, out):
    worker.save_value(3, out, epoch=epoch)


# Hostile files


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def rewritten(saved, change):
    """Changes the metadata of a checkpoint, which has no manifest then."""
    with (saved / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (saved / ".metadata").write_bytes(pickle.dumps(change(metadata)))
    (saved / "manifest.json").unlink()


def _outside(metadata):
    for place in metadata.storage_data.values():
        place.relative_path = "../other.distcp"
    return metadata


def _less(metadata):
    metadata.state_dict_metadata["a"].chunks.clear()
    return metadata


def _longer(metadata):
    for place in metadata.storage_data.values():
        place.length = 1 << 50
    return metadata


def _huge(metadata):
    tensor = metadata.state_dict_metadata["a"]
    tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 40])
    return metadata


def _nowhere(metadata):
    metadata.storage_data.clear()
    return metadata


def _transformed(metadata):
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]
    return metadata


def _running(metadata):
    metadata.planner_data = Call(os.system, "echo run > ran")
    return metadata


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (_running, CorruptCheckpointError, "asks for posix.system"),
        (lambda metadata: Call(eval, "open('ran', 'w')"), CorruptCheckpointError, "builtins.eval"),
        (lambda metadata: [metadata], CorruptCheckpointError, "in the place of a Metadata"),
        (_outside, UnsafePathError, "other.distcp"),
        (_less, CorruptCheckpointError, "9 elements have 0"),
        (_longer, CorruptCheckpointError, "truncated"),
        (_huge, TensorMismatchError, "1099511627776"),
        (_nowhere, CorruptCheckpointError, "does not say where a"),
        (_transformed, CorruptCheckpointError, "transformed"),
    ],
)
def test_metadata_that_runs_code_or_lies_is_refused(
    out, tmp_path, monkeypatch, change, error, match
):
    monkeypatch.chdir(tmp_path)
    saved = DistributedCheckpointer(out, out).save_checkpoint({"a": torch.randn(9)}, epoch=0)
    shutil.copy(saved / "__0_0.distcp", out / "other.distcp")
    rewritten(saved, change)
    with pytest.raises(error, match=match):
        DistributedCheckpointer(out, out).load_checkpoint({"a": torch.zeros(9)}, saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("instructions", "match"),
    [
        (b"\x80\x04r\xff\xff\xff\x7f.", "cannot be read"),  # room for 2**31 objects
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "cannot be read"),  # 2**40 bytes
        (b"\x80\x04cos\nsystem\n.", "cannot be read"),  # an instruction of older pickles
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "asks for os.system"),
    ],
)
def test_instructions_that_no_metadata_needs_are_not_followed(out, instructions, match):
    saved = DistributedCheckpointer(out, out).save_checkpoint({"a": torch.randn(9)}, epoch=0)
    (saved / ".metadata").write_bytes(instructions)
    (saved / "manifest.json").unlink()
    error = survives(
        lambda: DistributedCheckpointer(out, out).load_checkpoint({"a": torch.zeros(9)}, saved), out
    )
    assert match in str(error)


def test_classes_of_torch_cannot_be_changed_by_a_file(out):
    saved = DistributedCheckpointer(out, out).save_checkpoint({"a": torch.randn(9)}, epoch=0)
    module = b"torch.distributed.checkpoint.metadata"
    # BUILD on a class: sets an attribute of it.
    (saved / ".metadata").write_bytes(
        b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c\x08Metadata\x93"
        b"N}\x8c\x07version\x8c\x01xs\x86b."
    )
    (saved / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError):
        DistributedCheckpointer(out, out).load_checkpoint({"a": torch.zeros(9)}, saved)
    assert dcp.metadata.Metadata.version is None


@pytest.mark.parametrize("value", [torch.randn(9), 3], ids=["tensor", "number"])
def test_a_value_that_runs_code_is_refused(out, tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    hostile = Call(os.system, "echo run > ran")
    dcp.save({"a": value, "b": hostile}, checkpoint_id=out / "theirs")
    state = {"a": torch.zeros(9) if isinstance(value, torch.Tensor) else 0, "b": None}
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp: b .*posix.system"):
        DistributedCheckpointer(out, out).load_checkpoint(state, out / "theirs")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@cases(60, 2000)
def test_whatever_a_file_holds_it_is_loaded_or_refused_by_name(out, name, count):
    state = {"a": torch.randn(5, 3), "b": [1, "x"], "c": {"d": torch.ones((), dtype=torch.int32)}}
    saved = DistributedCheckpointer(out, out).save_checkpoint(state, epoch=0)
    (saved / "manifest.json").unlink()

    def load():
        found = {"a": torch.zeros(5, 3), "b": 0, "c": {"d": torch.ones((), dtype=torch.int32)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            DistributedCheckpointer(out, out).load_checkpoint(found, saved)

    def check(content):
        (saved / name).write_bytes(content)
        survives(load, out)

    fuzz(count, damaged((saved / name).read_bytes()), check)


# Crashes


def calls_of(out, save):
    recorder = Recorder()
    with watching(out, recorder):
        save()
    return len(recorder.tried)


def in_a_child(function):
    """Runs a function in a copy of this process; returns how it ended."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


def killed_at(at, out, save):
    with watching(out, Killer(at)):
        save()


@pytest.mark.parametrize("adapter_only", [False, True], ids=["whole", "adapter"])
def test_a_process_that_is_killed_at_any_call_leaves_the_old_one_or_the_new_one(out, adapter_only):
    old, new = {"a": torch.randn(9), "steps_run": 3}, {"a": torch.randn(9), "steps_run": 4}
    options = {"epoch": 0, "adapter_only": adapter_only}

    def save(state):
        return DistributedCheckpointer(out, out).save_checkpoint(state, **options)

    save(old)
    count = calls_of(out, lambda: save(new))
    assert count > 15
    seen = set()
    for at in range(count):
        shutil.rmtree(out)
        save(old)
        ended = in_a_child(lambda at=at: killed_at(at, out, lambda: save(new)))
        assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL
        checkpointer = DistributedCheckpointer(out, out)
        assert [path.name for path in out.iterdir() if path.name != ".run.lock"] == ["epoch_0"]
        assert not verify(out / "epoch_0").problems
        found = {"a": torch.zeros(9), "steps_run": 0}
        found = checkpointer.load_checkpoint(found, adapter_only=adapter_only)
        expected = old if found["steps_run"] == 3 else new
        check_same(found, expected)
        seen.add(found["steps_run"])
    assert seen == {3, 4}


@pytest.mark.parametrize("code", [5, 28], ids=["broken", "full"])
def test_whatever_call_is_refused_nothing_is_lost(out, code):
    old, new = {"a": torch.randn(9), "steps_run": 3}, {"a": torch.randn(9), "steps_run": 4}
    checkpointer = DistributedCheckpointer(out, out)
    checkpointer.save_checkpoint(old, epoch=0)
    count = calls_of(out, lambda: checkpointer.save_checkpoint(new, epoch=1))
    refused = 0
    for at in range(count):
        shutil.rmtree(out)
        checkpointer.save_checkpoint(old, epoch=0)
        disk = Faulty(code, at, lasting=False)
        try:
            with watching(out, disk):
                checkpointer.save_checkpoint(new, epoch=1)
        except WriteError as error:
            refused += 1
            assert str(out) in str(error)
        DistributedCheckpointer(out, out)
        names = {path.name for path in out.iterdir() if path.is_dir()}
        assert {"epoch_0"} <= names <= {"epoch_0", "epoch_1"}
        assert not any(verify(out / name).problems for name in names)
    assert refused > 10


@pytest.mark.parametrize("full_at", [0, 2, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_makes_all_fail_and_the_last_checkpoint_stays(job, out, rank, full_at):
    arguments = {"out": out, "layout": "fsdp", "dtype": torch.float32, "plain": True}
    job.run(worker.save, seed=3, **arguments)
    before = (out / "epoch_0" / "manifest.json").read_bytes()
    places = [full_at if one == rank else None for one in range(len(job))]
    answers = job.run(worker.save_on_a_disk, places, seed=4, epoch=1, **arguments)
    messages = raised(answers, OutOfSpaceError, "No space left on device")
    assert f"rank {rank}: " in messages[1 - rank] and f"rank {rank}: " not in messages[rank]
    DistributedCheckpointer(out, out)
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["epoch_0"]
    assert (out / "epoch_0" / "manifest.json").read_bytes() == before
    assert not verify(out / "epoch_0").problems
    expected, *_ = job.run(worker.save, seed=4, epoch=1, **arguments)
    check_same(worker.load(out, "whole", torch.float32, True), expected)


@pytest.mark.parametrize("save_async", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_makes_the_others_fail(out, tmp_path, victim, save_async):
    (tmp_path / "job").mkdir()
    job = Job(2, tmp_path / "job")
    try:
        arguments = {"out": out, "layout": "fsdp", "dtype": torch.float32, "plain": True}
        job.run(worker.save, seed=3, **arguments)
        started = time.monotonic()
        for rank, pipe in enumerate(job._pipes):
            options = {"out": out, "save_async": save_async}
            pipe.send((worker.save_and_die, [rank == victim], options))
        survivor = job._pipes[1 - victim]
        assert survivor.poll(60), "hangs"
        raised([survivor.recv()], RankLostError, "saving a checkpoint")
        assert time.monotonic() - started < 40
    finally:
        job.stop()
    DistributedCheckpointer(out, out)
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["epoch_0"]
    assert not verify(out / "epoch_0").problems
