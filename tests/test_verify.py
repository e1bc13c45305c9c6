"""Damage of every kind is found and named, and never resumed from."""

import itertools
import json
import os
import random
import shutil
import struct

import pytest
import torch
from safetensors import safe_open

from checkpointing.cli.main import main
from checkpointing.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpointing.verify import verify
from tests.test_checkpointers import CLASSES, adapter_state, make, write_base

STATE = {"optimizer": {"exp_avg": torch.arange(40.0), "step": torch.tensor(3.0)}, "steps_run": 3}


@pytest.fixture(scope="module", params=CLASSES)
def whole(request, tmp_path_factory):
    """A checkpoint of an adapter run, with weights in several files where the format has them."""
    directory = tmp_path_factory.mktemp(request.param)
    write_base(directory / "base", request.param)
    checkpointer = make(request.param, directory / "base")
    state = adapter_state(checkpointer.load_checkpoint()["model"], **STATE)
    options = {"max_shard_size": "40kB"} if request.param != "meta" else {}
    return checkpointer.save_checkpoint(state, epoch=0, **options)


@pytest.fixture
def checkpoint(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "epoch_0")


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.name != "manifest.json")


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def tensor_at(path, byte):
    """The tensor in whose data a byte of a safetensors file lies; ``None`` for the header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, entry in header.items():
        begin, end = entry.get("data_offsets", (0, 0))
        if 8 + length + begin <= byte < 8 + length + end:
            return name
    return None


def flips(checkpoint, count):
    """Flips single bits all over a checkpoint, each time verifies, and flips them back."""
    generator = random.Random(count)
    files = [path for path in files_of(checkpoint) if path.is_file()]
    for _ in range(count):
        path = generator.choices(files, [path.stat().st_size for path in files])[0]
        bit = generator.randrange(8 * path.stat().st_size)
        expected = tensor_at(path, bit // 8) if path.suffix == ".safetensors" else None
        flip(path, bit)
        (problem,) = verify(checkpoint).problems
        assert str(path) in problem
        if expected is not None:
            assert problem.endswith(f"the data of {expected}")
        flip(path, bit)
    assert not verify(checkpoint).problems


def test_every_flipped_bit_is_found_and_its_tensor_named(checkpoint):
    flips(checkpoint, 40)


@pytest.mark.slow
def test_each_of_a_thousand_flipped_bits_is_found(checkpoint):
    flips(checkpoint, 1000)


def test_a_flipped_bit_in_a_file_of_torch_is_named_with_its_tensor(checkpoint):
    path = checkpoint / "recipe_state.pt"
    start = path.read_bytes().index(torch.arange(40.0).numpy().tobytes())
    flip(path, 8 * (start + 21))
    (problem,) = verify(checkpoint).problems
    assert problem == f"{path}: is damaged: the data of optimizer.exp_avg"


def test_missing_truncated_and_longer_files_are_found(checkpoint):
    for path in files_of(checkpoint):
        if path.is_dir():
            continue
        content = path.read_bytes()
        for changed, found in (
            (content[:-1], f"has {len(content) - 1} bytes"),
            (content + b"0", f"has {len(content) + 1} bytes"),
            (None, "is missing"),
        ):
            path.unlink()
            if changed is not None:
                path.write_bytes(changed)
            (problem,) = verify(checkpoint).problems
            assert problem == f"{path}: {found}, the manifest says {len(content)} bytes"
            path.write_bytes(content)
    assert not verify(checkpoint).problems


def test_swapped_files_are_found(checkpoint):
    files = [path for path in files_of(checkpoint) if path.is_file()]
    first, second = next(
        (a, b)
        for a, b in itertools.combinations(files, 2)
        if a.suffix == b.suffix and a.stat().st_size != b.stat().st_size
    )
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert len(verify(checkpoint).problems) == 2


def test_a_shard_of_another_checkpoint_with_the_same_names_and_sizes_is_found(whole, checkpoint):
    path = next(p for p in files_of(checkpoint) if p.suffix in (".safetensors", ".bin", ".pth"))
    content = bytearray(path.read_bytes())
    # As if it had been trained further: only data differs.
    content[-400:-300] = bytes(100)
    path.write_bytes(content)
    (problem,) = verify(checkpoint).problems
    assert "the data of" in problem or "cannot be read" in problem


def test_a_file_that_would_be_taken_for_weights_is_found(checkpoint):
    shard = next(p for p in files_of(checkpoint) if p.suffix in (".safetensors", ".bin", ".pth"))
    copy = shard.with_name(f"model-00009-of-00009{shard.suffix}")
    shutil.copy(shard, copy)
    (problem,) = verify(checkpoint).problems
    assert problem.startswith(f"{copy}: is not in manifest.json")


def test_what_is_no_weight_may_lie_beside(checkpoint):
    (checkpoint / "notes.txt").write_text("the good one")
    assert not verify(checkpoint).problems


def test_a_model_of_others_is_checked_by_its_structure(tmp_path):
    write_base(tmp_path / "base", "hf")
    found = verify(tmp_path / "base")
    assert (found.problems, found.has_checksums, found.files) == ((), False, 1)
    path = tmp_path / "base" / "model.safetensors"
    with safe_open(path, "pt") as file:
        names = list(file.keys())
    index = {"weight_map": dict.fromkeys([*names, "model.layers.9.stale"], "model.safetensors")}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    path.rename(tmp_path / "base" / "model-00001.safetensors")
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00001.safetensors")
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = verify(tmp_path / "base").problems
    assert "model.layers.9.stale" in problem
    with pytest.raises(CheckpointNotFoundError, match="no directory"):
        verify(tmp_path / "nowhere")


def test_the_command_says_what_is_damaged_and_exits_with_1(whole, checkpoint, capsys):
    assert main(["verify", str(whole)]) == 0
    assert "every byte as it was saved" in capsys.readouterr().out
    path = checkpoint / "recipe_state.pt"
    flip(path, 8 * (path.stat().st_size // 2))
    assert main(["verify", str(checkpoint), str(whole)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out and str(path) in out and "intact" in out
    (checkpoint / "manifest.json").write_text("{")
    assert main(["verify", str(checkpoint), "--json"]) == 1
    assert str(checkpoint) in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("file", ["recipe_state.pt", "adapter_model.pt"])
def test_a_damaged_checkpoint_is_passed_over_loudly_for_the_newest_intact_one(
    tmp_path, caplog, name, file
):
    base = tmp_path / "base"
    write_base(base, name)
    saving = make(name, base)
    weights = saving.load_checkpoint()["model"]
    for step in (1, 2, 3):
        state = adapter_state(weights, steps_run=step, optimizer=STATE["optimizer"])
        saving.save_checkpoint(state, epoch=0, step=step, dir_prefix="step")
    for step in (2, 3):
        path = tmp_path / "out" / f"step_{step}" / file
        flip(path, 8 * (path.stat().st_size // 2))
    resumed = make(name, base, should_load_recipe_state=True).load_checkpoint()
    assert resumed["steps_run"] == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("NOT RESUMED FROM" in message for message in warnings) == 2
    assert any(str(tmp_path / "out" / "step_3" / file) in message for message in warnings)
    named = str(tmp_path / "out" / "step_3")
    with pytest.raises(CorruptCheckpointError, match="is not what was saved"):
        make(name, base, should_load_recipe_state=named)
    path = tmp_path / "out" / "step_1" / file
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError), match="out"):
        make(name, base, should_load_recipe_state=True)
