import errno
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from checkpointing.errors import OutOfSpaceError, WriteError
from checkpointing.storage import commit
from checkpointing.storage.commit import check_room, recover, remove_directory, staged_directory
from checkpointing.storage.exchange import exchange


def content(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


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


def test_what_a_living_process_writes_is_not_removed_until_it_is_killed(tmp_path):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from checkpointing.storage.commit import staged_directory\n"
        "with staged_directory(Path(sys.argv[1]) / 'epoch_1') as staging:\n"
        "    print(staging, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as living:
        staging = Path(living.stdout.readline().strip())
        recover(tmp_path)
        assert staging.is_dir()
        living.kill()
        living.wait()
        recover(tmp_path)
        assert not staging.exists()


def test_what_others_left_is_not_removed(tmp_path):
    kept = {".cache", ".epoch_1.saving-soon", "epoch_0", ".model.partial-0a1b"}
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".epoch_2.saving-0a1b").write_text("a file, not a directory of ours")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("1")
    (tmp_path / ".epoch_3.saving-0a1b").symlink_to(tmp_path / "elsewhere")
    recover(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= kept | {".epoch_2.saving-0a1b"}
    assert content(tmp_path / "elsewhere") == {"a": "1"}


def test_a_replacement_that_was_cut_short_is_undone(tmp_path):
    # Killed between moving the old directory away and the new one in.
    old = tmp_path / ".epoch_0.replaced-0a1b"
    old.mkdir()
    (old / "a").write_text("old")
    recover(tmp_path)
    assert content(tmp_path) == {"epoch_0/a": "old"}


def test_an_old_directory_is_removed_if_its_replacement_is_in_place(tmp_path):
    old = tmp_path / ".epoch_0.replaced-0a1b"
    old.mkdir()
    (tmp_path / "epoch_0").mkdir()
    (tmp_path / "epoch_0" / "a").write_text("new")
    recover(tmp_path)
    assert content(tmp_path) == {"epoch_0/a": "new"} and not old.exists()


def test_a_part_of_an_old_directory_is_never_put_back(tmp_path, monkeypatch):
    """Killed while it removes what was replaced; then again, between the two renames."""
    old = tmp_path / ".epoch_0.replaced-0a1b"
    old.mkdir()
    (old / "a").write_text("older")
    (old / "b").write_text("older")
    (tmp_path / "epoch_0").mkdir()
    (tmp_path / "epoch_0" / "a").write_text("old")

    def killed_half_way(directory, ignore_errors):
        (directory / "b").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed_half_way)
        recover(tmp_path)
    # A name that comes after that of the half-removed one, in whatever order they are gone through.
    (tmp_path / "epoch_0").rename(tmp_path / ".epoch_0.replaced-ff")
    recover(tmp_path)
    assert content(tmp_path) == {"epoch_0/a": "old"}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_link_is_replaced_and_what_it_leads_to_is_kept(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    for directory in (elsewhere, out):
        directory.mkdir()
    (elsewhere / "a").write_text("old")
    (out / "epoch_0").symlink_to(elsewhere)
    with staged_directory(out / "epoch_0") as staging:
        (staging / "a").write_text("new")
    assert content(out) == {"epoch_0/a": "new"}
    assert content(elsewhere) == {"a": "old"}
    assert [path.name for path in out.iterdir()] == ["epoch_0"]


def test_a_refused_second_rename_leaves_the_old_directory_in_its_place(tmp_path, monkeypatch):
    final = tmp_path / "epoch_0"
    with staged_directory(final) as staging:
        (staging / "a").write_text("old")
    real = os.rename

    def refuses(source, destination):
        if ".saving-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        real(source, destination)

    monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", refuses)
    message = "epoch_0: could not be saved: Input/output error"
    with pytest.raises(WriteError, match=message), staged_directory(final) as staging:
        (staging / "a").write_text("new")
    assert content(tmp_path) == {"epoch_0/a": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, OutOfSpaceError),
        (errno.EDQUOT, OutOfSpaceError),
        (errno.EIO, WriteError),
        (errno.EACCES, WriteError),
    ],
    ids=errno.errorcode.get,
)
def test_an_error_of_the_system_says_what_and_where(tmp_path, code, error):
    with pytest.raises(error) as found, staged_directory(tmp_path / "epoch_4"):
        raise OSError(code, os.strerror(code), "weights.bin")
    assert type(found.value) is error
    start = f"{tmp_path / 'epoch_4'}: could not be saved: {os.strerror(code)} (weights.bin); "
    assert str(found.value).startswith(start)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_torch_save_hides_is_found(tmp_path):
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() > 100:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    message = "epoch_0: could not be saved: No space left on device"
    with pytest.raises(OutOfSpaceError, match=message), staged_directory(tmp_path / "epoch_0"):
        torch.save({"a": torch.ones(7)}, Full())


def test_other_errors_are_left_as_they_are(tmp_path):
    message = "^no error of the system$"
    with pytest.raises(RuntimeError, match=message), staged_directory(tmp_path / "epoch_0"):
        raise RuntimeError("no error of the system")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_outlives_a_killed_process_does_not_keep_its_lock(tmp_path):
    """Workers of a data loader may be forked while a save runs."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from checkpointing.storage.commit import staged_directory\n"
        "with staged_directory(Path(sys.argv[1]) / 'epoch_3'):\n"
        "    if os.fork() == 0:\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as killed:
        assert killed.wait() == -9
        assert len(list(tmp_path.iterdir())) == 1
        deadline = time.monotonic() + 20
        while list(tmp_path.iterdir()) and time.monotonic() < deadline:
            recover(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_many_processes_that_save_and_recover_at_once_do_not_disturb_each_other(tmp_path):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from checkpointing.storage.commit import recover, staged_directory\n"
        "out = Path(sys.argv[1])\n"
        "for number in range(60):\n"
        "    recover(out)\n"
        "    with staged_directory(out / sys.argv[2]) as staging:\n"
        "        (staging / 'a').write_text(str(number))\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), name], stderr=subprocess.PIPE
        )
        for name in ("one", "two", "three")
    ]
    errors = [process.communicate()[1].decode() for process in running]
    assert errors == [""] * 3
    assert content(tmp_path) == {"one/a": "59", "two/a": "59", "three/a": "59"}
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "three"}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_reader_never_sees_a_mix_while_a_directory_is_replaced(
    tmp_path, monkeypatch, can_exchange
):
    if not can_exchange:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    final = tmp_path / "epoch_0"

    def write(number):
        with staged_directory(final) as staging:
            for name in ("a", "b"):
                (staging / name).write_text(str(number))

    write(0)
    seen, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            try:
                # What is open stays what it was, whatever is renamed.
                descriptor = os.open(final, os.O_RDONLY)
            except FileNotFoundError:
                seen.append("nothing")
                continue
            # The directory that was replaced is removed, perhaps between the two.
            with suppress(FileNotFoundError):
                files = [os.open(name, os.O_RDONLY, dir_fd=descriptor) for name in ("a", "b")]
                seen.append(tuple(os.read(file, 9) for file in files))
                for file in files:
                    os.close(file)
            os.close(descriptor)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 60):
        write(number)
    stop.set()
    reader.join()
    pairs = [pair for pair in seen if pair != "nothing"]
    assert len(pairs) > 10 and all(first == second for first, second in pairs)
    if can_exchange:
        assert "nothing" not in seen


def test_names_are_exchanged_at_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "was").write_text(name)
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert content(tmp_path) == {"a/was": "b", "b/was": "a"}
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "not there")


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
