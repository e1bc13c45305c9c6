import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from checkpointing.errors import OutOfSpaceError
from checkpointing.storage.commit import check_room, recover, remove_directory, staged_directory


def content(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_directory_appears_whole_and_leaves_nothing_hidden(tmp_path):
    with staged_directory(tmp_path / "out" / "epoch_0") as staging:
        (staging / "a").write_text("1")
        assert not (tmp_path / "out" / "epoch_0").exists()
    assert content(tmp_path / "out") == {"epoch_0/a": "1"}


def test_an_exception_leaves_what_was_there_before(tmp_path):
    final = tmp_path / "epoch_0"
    with staged_directory(final) as staging:
        (staging / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), staged_directory(final) as staging:
        (staging / "a").write_text("new")
        raise KeyboardInterrupt
    assert content(tmp_path) == {"epoch_0/a": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0"]


def test_an_existing_directory_is_replaced_and_not_mixed(tmp_path):
    final = tmp_path / "epoch_0"
    for files in ({"a": "1", "b": "1"}, {"b": "2"}):
        with staged_directory(final) as staging:
            for name, text in files.items():
                (staging / name).write_text(text)
    assert content(tmp_path) == {"epoch_0/b": "2"}


def test_a_process_that_is_killed_while_saving_leaves_no_final_name(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from checkpointing.storage.commit import staged_directory\n"
        "with staged_directory(Path(sys.argv[1]) / 'epoch_3') as staging:\n"
        "    (staging / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert killed.returncode == -9
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".epoch_3.saving-")
    recover(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_living_process_writes_and_what_others_left_is_not_removed(tmp_path):
    living = tmp_path / f".epoch_1.saving-{os.getppid()}"
    foreign = tmp_path / ".cache"
    odd = tmp_path / ".epoch_1.saving-soon"
    for path in (living, foreign, odd, tmp_path / "epoch_0"):
        path.mkdir()
    (tmp_path / f".epoch_2.saving-{dead_pid()}").write_text("a file, not a directory of ours")
    recover(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {
        living.name,
        foreign.name,
        odd.name,
        "epoch_0",
    }


def test_a_replacement_that_was_cut_short_is_undone(tmp_path):
    # Killed between moving the old directory away and the new one in.
    old = tmp_path / f".epoch_0.replaced-{dead_pid()}"
    old.mkdir()
    (old / "a").write_text("old")
    recover(tmp_path)
    assert content(tmp_path) == {"epoch_0/a": "old"}


def test_an_old_directory_is_removed_if_its_replacement_is_in_place(tmp_path):
    old = tmp_path / f".epoch_0.replaced-{dead_pid()}"
    old.mkdir()
    (tmp_path / "epoch_0").mkdir()
    (tmp_path / "epoch_0" / "a").write_text("new")
    recover(tmp_path)
    assert content(tmp_path) == {"epoch_0/a": "new"} and not old.exists()


def test_a_removed_directory_is_gone(tmp_path):
    (tmp_path / "epoch_0").mkdir()
    remove_directory(tmp_path / "epoch_0")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 9 * 10**8, 10**8))
    check_room(tmp_path / "not" / "yet", 10**8)
    with pytest.raises(OutOfSpaceError, match=r"0\.20 GB are needed and 0\.10 GB are free"):
        check_room(tmp_path / "not" / "yet", 2 * 10**8)
    assert list(tmp_path.iterdir()) == []
