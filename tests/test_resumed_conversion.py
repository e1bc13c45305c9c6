"""A conversion that was cut short goes on, and ends as if nothing had happened."""

import json
import os
import re
import shutil
import signal
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.cli.main import main
from checkpointing.convert import plan_conversion
from checkpointing.merge import plan_merge
from checkpointing.storage.run_lock import LOCK_NAME
from checkpointing.storage.threads import THREADS_VARIABLE
from tests.cli.test_convert import write_base
from tests.cli.test_merge import save_adapter
from tests.crash.disk import Disk, write_tree
from tests.crash.hooks import Recorder, watching
from tests.stopped_command import Stopping
from tests.tiny import ATTENTION, MLP, random_adapter
from tests.training.peers import config

SHARDS = ("--max-shard-size", "20kB")
ADAPTER = AdapterConfig(r=4, alpha=6.0, target_modules=(*ATTENTION, *MLP, "output"))


@pytest.fixture(scope="module")
def stopping(tmp_path_factory):
    stopping = Stopping(tmp_path_factory.mktemp("stopping"))
    yield stopping
    stopping.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("models") / "base", config())


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """What a conversion gives that nothing disturbs: the content of each file."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert main(["convert", str(base), str(out), "--to", "tune", *SHARDS]) == 0
    found = contents(out)
    assert set(found) == {"manifest.json", *json.loads(found["manifest.json"])["files"]}
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def weight_files(found) -> list[str]:
    return sorted(name for name in found if name.endswith(".safetensors"))


def command(base: Path, out: Path) -> tuple[str | Path, ...]:
    return ("convert", base, out, "--to", "tune", *SHARDS)


def run(*arguments: str | Path) -> int:
    return main([str(each) for each in arguments])


def partial_of(out: Path) -> Path:
    (partial,) = out.parent.glob(f".{out.name}.partial-*")
    return partial


def identities(directory: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of modification of each weight file."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in directory.glob("*.safetensors")
    }


def assert_went_on(out: Path, before: dict[str, tuple[int, int]], undisturbed) -> None:
    """The result is the undisturbed one, with the files that were finished before."""
    assert contents(out) == undisturbed
    assert before.items() <= identities(out).items()
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def finished(out: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    found = identities(partial_of(out))
    return {name: found[name] for name in names}


@pytest.mark.parametrize(
    ("event", "file", "count"),
    [
        ("open", "{4}", 4),
        # The file is whole, and not listed.
        ("open", ".finished.json.new", 0),
        ("os.rename", ".finished.json", 0),
        ("open", "manifest.json", None),
    ],
)
def test_a_killed_conversion_goes_on_where_it_was(
    stopping, tmp_path, base, undisturbed, event, file, count
):
    out, names = tmp_path / "out", weight_files(undisturbed)
    assert len(names) > 8
    dead = stopping.run(event, file.format(*names), "SIGKILL", *command(base, out))
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert not out.exists()
    before = finished(out, names[:count])
    assert run(*command(base, out)) == 0
    assert_went_on(out, before, undisturbed)


def test_it_can_be_killed_again_and_again(stopping, tmp_path, base, undisturbed):
    out, names = tmp_path / "out", weight_files(undisturbed)
    before = {}
    for number in (2, 3, 7):
        dead = stopping.run("open", names[number], "SIGKILL", *command(base, out))
        assert dead.returncode == -signal.SIGKILL, dead.stderr
        now = finished(out, names[:number])
        assert before.items() <= now.items()
        before = now
    assert run(*command(base, out)) == 0
    assert_went_on(out, before, undisturbed)


@pytest.mark.parametrize("replaces", [False, True])
def test_whatever_a_power_loss_leaves_the_conversion_goes_on(tmp_path, base, monkeypatch, replaces):
    root, before = tmp_path / "root", tmp_path / "before"
    root.mkdir()
    if replaces:
        assert run("convert", base, root / "out", "--to", "hf") == 0
    shutil.copytree(root, before)
    recorder = Recorder()
    # One thread makes its calls in one order.
    monkeypatch.setenv(THREADS_VARIABLE, "1")
    size = ("--max-shard-size", "60kB", "--overwrite")
    with watching(root, recorder):
        assert run("convert", base, root / "out", "--to", "tune", *size) == 0
    whole, old = contents(root / "out"), contents(before / "out") if replaces else None
    monkeypatch.setattr(os, "fsync", os.fstat)
    disk, begun = Disk(before), 0
    for number, call in enumerate(recorder.made):
        paths = (path.replace(str(root), str(before), 1) for path in (call.path, call.other))
        disk.apply(replace(call, **dict(zip(("path", "other"), paths, strict=True))))
        is_begun = call.kind == "create" and call.path.endswith(".safetensors")
        begun = begun + 1 if is_begun else begun
        if number % 7 and call.kind != "rename" and not is_begun:
            continue
        for tree in disk.after_losses(3):
            out = tmp_path / "lost" / "out"
            write_tree(tree, out.parent)
            assert not out.exists() or contents(out) in (whole, old), call
            there = [identities(path) for path in out.parent.glob(".out.partial-*")]
            assert run("convert", base, out, "--to", "tune", *size) == 0
            kept = sum(len(each.items() & identities(out).items()) for each in there)
            # Those before the one that was begun are on the disk for good.
            assert not is_begun or kept == begun - 1, call
            assert_went_on(out, {}, whole)
            shutil.rmtree(out.parent)
    assert begun == len(weight_files(whole)) > 3


def test_killed_as_it_gets_its_name_it_leaves_what_the_next_save_removes(
    stopping, tmp_path, base, undisturbed
):
    out = tmp_path / "out"
    dead = stopping.run("os.rename", "out", "SIGKILL", *command(base, out))
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert not out.exists()
    assert run(*command(base, out)) == 0
    assert_went_on(out, {}, undisturbed)


def test_a_replacement_goes_on_too_and_the_old_one_stays_until_then(
    stopping, tmp_path, base, undisturbed, capsys
):
    out, names = tmp_path / "out", weight_files(undisturbed)
    assert run("convert", base, out, "--to", "hf") == 0
    old = contents(out)
    again = (*command(base, out), "--overwrite")
    stopping.run("open", names[5], "SIGKILL", *again)
    before = finished(out, names[:5])
    assert run(*command(base, out)) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert contents(out) == old
    assert run(*again) == 0
    assert_went_on(out, before, undisturbed)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def put_a_link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


@pytest.mark.parametrize("damage", [flip_a_bit, shorten, put_a_link, os.unlink])
def test_a_finished_file_that_is_damaged_is_written_anew_and_no_other(
    stopping, tmp_path, base, undisturbed, damage
):
    out, names = tmp_path / "place" / "out", weight_files(undisturbed)
    stopping.run("open", names[4], "SIGKILL", *command(base, out))
    before = finished(out, names[:4])
    del before[names[1]]
    damage(partial_of(out) / names[1])
    (partial_of(out) / "left").mkdir()
    (partial_of(out) / "left" / "over").touch()
    damaged = identities(partial_of(out))
    assert run(*command(base, out)) == 0
    (out.parent / "elsewhere").unlink(missing_ok=True)
    assert_went_on(out, before, undisturbed)
    if damage in (flip_a_bit, shorten):
        assert identities(out)[names[1]][1] > damaged[names[1]][1]


def touch(base: Path) -> tuple[str, ...]:
    file = base / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    return SHARDS


def change_a_side_file(base: Path) -> tuple[str, ...]:
    (base / "generation_config.json").write_text("{}")
    return SHARDS


def give_another_size(base: Path) -> tuple[str, ...]:
    return ("--max-shard-size", "21kB")


@pytest.mark.parametrize("change", [touch, change_a_side_file, give_another_size])
def test_another_conversion_never_goes_on_and_removes_what_this_one_left(
    stopping, tmp_path, base, undisturbed, change, caplog, capsys
):
    source, out = tmp_path / "base", tmp_path / "place" / "out"
    shutil.copytree(base, source)
    stopping.run("open", weight_files(undisturbed)[5], "SIGKILL", *command(source, out))
    old = finished(out, weight_files(undisturbed)[:5])
    assert old
    left = partial_of(out)
    arguments = ("convert", source, out, "--to", "tune", *change(source))
    assert run(*arguments) == 0
    assert f"removing {left}" in caplog.text and "goes on" not in capsys.readouterr().out
    assert not set(identities(out).values()) & set(old.values())
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    whole = tmp_path / "whole"
    assert run("convert", source, whole, "--to", "tune", *arguments[5:]) == 0
    assert contents(out) == contents(whole)


def test_ctrl_c_leaves_what_the_same_command_goes_on_from(
    stopping, tmp_path, base, undisturbed, capsys
):
    out, names = tmp_path / "out", weight_files(undisturbed)
    done = stopping.run("open", names[3], "SIGINT", *command(base, out))
    assert done.returncode == 130
    text = f"3 of {len(names)} weight files are finished and stay in {partial_of(out)}"
    assert done.stderr == f"{text}; the same command goes on from there\ninterrupted\n"
    before = finished(out, names[:3])

    assert run(*command(base, out), "--dry-run") == 0
    there = f"goes on with {partial_of(out)}: 3 of {len(names)} weight files are there"
    assert there in capsys.readouterr().out
    assert finished(out, names[:3]) == before and not out.exists()

    assert run(*command(base, out)) == 0
    assert there in capsys.readouterr().out
    assert_went_on(out, before, undisturbed)


@pytest.mark.parametrize("what", ["SIGINT", "ENOSPC"])
def test_nothing_is_left_if_no_file_is_finished(stopping, tmp_path, base, undisturbed, what):
    done = stopping.run(
        "open", weight_files(undisturbed)[0], what, *command(base, tmp_path / "out")
    )
    assert done.returncode == {"SIGINT": 130, "ENOSPC": 1}[what]
    assert "the same command" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("ENOSPC", "No space left on device"),
        ("EFBIG", "File too large"),
        ("EIO", "Input/output error"),
    ],
)
def test_after_the_system_refused_to_write_the_same_command_goes_on(
    stopping, tmp_path, base, undisturbed, what, says
):
    out, names = tmp_path / "out", weight_files(undisturbed)
    done = stopping.run("open", names[6], what, *command(base, out))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {out}: could not be saved: {says}")
    assert done.stderr.endswith(
        f"6 of {len(names)} weight files are finished and stay in {partial_of(out)}; "
        "the same command goes on from there\n"
    )
    before = finished(out, names[:6])
    assert run(*command(base, out)) == 0
    assert_went_on(out, before, undisturbed)


def test_after_any_other_error_nothing_is_left(stopping, tmp_path, base, undisturbed):
    done = stopping.run(
        "open", weight_files(undisturbed)[4], "bug", *command(base, tmp_path / "out")
    )
    assert done.returncode == 1 and "not an error of the system" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_room_is_needed_only_for_what_is_missing(
    stopping, tmp_path, base, undisturbed, monkeypatch
):
    out, names = tmp_path / "out", weight_files(undisturbed)
    stopping.run("open", names[5], "SIGKILL", *command(base, out))
    plan = plan_conversion(base, "tune", max_shard_size="20kB")
    there = sum(len(undisturbed[name]) for name in names[:5])
    usage = namedtuple("usage", "total used free")
    free = plan.nbytes - there + 5 * 4096
    assert free < plan.nbytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - free, free))
    assert run("convert", base, tmp_path / "other", "--to", "tune", *SHARDS) == 1
    assert run(*command(base, out)) == 0
    assert contents(out) == undisturbed


def state_of(process: int) -> str:
    """Of proc(5): R when it runs, T when it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_two_processes_are_never_at_the_same_conversion(
    stopping, tmp_path, base, undisturbed, capsys
):
    out, names = tmp_path / "out", weight_files(undisturbed)
    process = stopping.start("open", names[2], "SIGSTOP", *command(base, out))
    try:
        while state_of(process) != "T":
            time.sleep(0.01)
        assert run(*command(base, out)) == 1
        said = capsys.readouterr().err
        assert "another process is at the same conversion" in said and str(partial_of(out)) in said
        # Nor does another conversion remove what a living process is at.
        assert run("convert", base, out, "--to", "hf") == 0
        assert finished(out, names[:2])
    finally:
        os.kill(process, signal.SIGCONT)
    assert stopping.finish().returncode == 0
    assert_went_on(out, {}, undisturbed)


def test_other_saves_beside_it_leave_it_alone(stopping, tmp_path, base, undisturbed):
    out, names = tmp_path / "out", weight_files(undisturbed)
    stopping.run("open", names[3], "SIGKILL", *command(base, out))
    before = finished(out, names[:3])
    assert run("convert", base, tmp_path / "out2", "--to", "hf") == 0
    FullModelHFCheckpointer(base, output_dir=tmp_path).save_checkpoint(
        {"adapter": random_adapter(config().dims, ADAPTER), "adapter_config": ADAPTER.to_state()},
        epoch=0,
        adapter_only=True,
        step=1,
    )
    for name in ("out2", "epoch_0"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / LOCK_NAME).unlink(missing_ok=True)
    assert run(*command(base, out)) == 0
    assert_went_on(out, before, undisturbed)


def made_up_lists(names: list[str], entries) -> dict[str, str]:
    """Lists of finished files of which none tells anything true of a file that will be written."""
    first = entries[names[0]]
    wrong = [line[15::-1] + line[16:] for line in first["xxh3_64"]]
    return {
        "torn": json.dumps(entries)[:-9],
        "zeros": "\0" * 300,
        "a list": "[]",
        "elsewhere": json.dumps({"../secret": first, "/etc/hostname": first, "": first}),
        "no entries": json.dumps({names[0]: 7, names[1]: None, names[2]: {"size": -1}}),
        "of another size": json.dumps({names[0]: entries[names[1]], names[1]: first}),
        "wrong": json.dumps({names[0]: {**first, "xxh3_64": wrong}}),
        "deep": "[" * 100000,
    }


@pytest.mark.parametrize(
    "kind",
    ["torn", "zeros", "a list", "elsewhere", "no entries", "of another size", "wrong", "deep"],
)
def test_a_list_that_tells_nothing_true_is_of_no_use_and_no_harm(
    tmp_path, base, undisturbed, kind, capsys
):
    out, names = tmp_path / "place" / "out", weight_files(undisturbed)
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "secret").write_bytes(undisturbed[names[0]])
    key = plan_conversion(base, "tune", max_shard_size="20kB").key
    partial = out.with_name(f".out.partial-{key}")
    partial.mkdir()
    for name in names:
        (partial / name).write_bytes(undisturbed[name])
    old = set(identities(partial).values())
    entries = json.loads(undisturbed["manifest.json"])["files"]
    (partial / ".finished.json").write_text(made_up_lists(names, entries)[kind])
    assert run(*command(base, out)) == 0
    # One of these is of the right size, and nothing else.
    assert ("goes on" in capsys.readouterr().out) == (kind == "wrong")
    assert not old & set(identities(out).values())
    assert (tmp_path / "place" / "secret").read_bytes() == undisturbed[names[0]]
    (tmp_path / "place" / "secret").unlink()
    assert_went_on(out, {}, undisturbed)


def test_a_link_in_the_place_of_the_hidden_directory_is_not_followed(tmp_path, base, capsys):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("years of work")
    key = plan_conversion(base, "tune", max_shard_size="20kB").key
    (tmp_path / f".out.partial-{key}").symlink_to(elsewhere)
    assert run(*command(base, out)) == 1
    assert "is in the way" in capsys.readouterr().err
    assert (elsewhere / "thesis.txt").exists() and not out.exists()


def report(printed: str) -> list[str]:
    return printed[printed.index("what rounding") :].splitlines()


@pytest.mark.parametrize("form", ["native", "PEFT"])
def test_a_merge_goes_on_and_reports_what_an_undisturbed_one_does(stopping, tmp_path, capsys, form):
    base = write_base(tmp_path / "base", config(), torch.bfloat16)
    adapter = save_adapter(base, tmp_path / "run", ADAPTER)
    if form == "PEFT":
        for name in ("adapter_model.pt", "manifest.json"):
            (adapter / name).unlink()
    out = tmp_path / "place" / "out"
    assert run("merge", base, adapter, tmp_path / "whole", *SHARDS) == 0
    whole, expected = contents(tmp_path / "whole"), report(capsys.readouterr().out)
    names = weight_files(whole)
    arguments = ("merge", base, adapter, out, *SHARDS)
    done = stopping.run("open", names[4], "SIGINT", *arguments)
    assert done.returncode == 130 and f"4 of {len(names)} weight files" in done.stderr
    before = finished(out, names[:4])
    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    assert f"4 of {len(names)} weight files are there" in printed
    assert report(printed) == expected
    assert_went_on(out, before, whole)


@pytest.mark.parametrize("what", ["adapter", "measured"])
def test_a_merge_of_which_something_differs_does_not_go_on(stopping, tmp_path, capsys, what):
    base = write_base(tmp_path / "base", config(), torch.bfloat16)
    adapter = save_adapter(base, tmp_path / "run", ADAPTER)
    out = tmp_path / "place" / "out"
    names = plan_merge(base, adapter, max_shard_size="20kB").plan.weight_files
    stopping.run("open", names[5], "SIGKILL", "merge", base, adapter, out, *SHARDS)
    old = finished(out, names[:5])
    if what == "adapter":
        shutil.rmtree(adapter)
        state = {
            "adapter": random_adapter(config().dims, ADAPTER, seed=12),
            "adapter_config": ADAPTER.to_state(),
        }
        checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "run")
        assert checkpointer.save_checkpoint(state, epoch=2, adapter_only=True, step=17) == adapter
    else:
        file = partial_of(out) / ".finished.json"
        text, count = re.subn(r'"layers\.0\.attn\.q_proj": \[', "\\g<0>0, ", file.read_text())
        assert count == 1
        file.write_text(text)
    assert run("merge", base, adapter, tmp_path / "whole", *SHARDS) == 0
    expected = report(capsys.readouterr().out)
    assert run("merge", base, adapter, out, *SHARDS) == 0
    assert report(capsys.readouterr().out) == expected
    assert not set(old.values()) & set(identities(out).values())
    assert contents(out) == contents(tmp_path / "whole")


def test_what_a_merge_computes_with_tells_it_from_others(tmp_path):
    base = write_base(tmp_path / "base", config())
    plan = plan_merge(base, save_adapter(base, tmp_path / "run", ADAPTER)).plan
    assert plan.computed_with["base_rounding"] is None
    rounded = {**plan.computed_with, "base_rounding": {"quantization": "nf4"}}
    assert replace(plan, computed_with=rounded).key != plan.key
