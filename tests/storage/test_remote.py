import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

from checkpointing import AsyncCheckpointer, FullModelHFCheckpointer
from checkpointing.cli.main import main
from checkpointing.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    RemoteError,
    WriteError,
)
from checkpointing.mapping.tensors import as_source
from checkpointing.remote_output import RemoteOutput
from checkpointing.retention import Retention
from checkpointing.storage.location import path_or_url
from checkpointing.storage.mirror import complete_generation, local
from checkpointing.storage.publish import published, upload
from checkpointing.storage.remote import RemoteDirectory
from checkpointing.storage.writer import CheckpointWriter
from checkpointing.verify import verify
from tests.cli.command import environment
from tests.storage.s3_server import CREDENTIALS, Line, s3_server
from tests.training import runs


class Killed(BaseException):
    """The process is dead from here on."""


class MortalFileSystem(MemoryFileSystem):
    """The file system memory://, whose user dies at a certain change to it."""

    protocol = "mortal"
    changes_left = 10**9
    downloads: list[str] = []  # noqa: RUF012  of all instances

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(str(path).replace("mortal://", "memory://"))

    def _change(self):
        MortalFileSystem.changes_left -= 1
        if MortalFileSystem.changes_left < 0:
            raise Killed

    def pipe_file(self, path, value, **options):
        self._change()
        super().pipe_file(path, value, **options)

    def put_file(self, lpath, rpath, **options):
        self._change()
        super().put_file(lpath, rpath, **options)

    def cp_file(self, path1, path2, **options):
        self._change()
        super().cp_file(path1, path2, **options)

    def rm_file(self, path):
        self._change()
        super().rm_file(path)

    def get_file(self, rpath, lpath, **options):
        self.downloads.append(rpath.rpartition("/")[2])
        super().get_file(rpath, lpath, **options)


fsspec.register_implementation("mortal", MortalFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEPOINT_CACHE", str(tmp_path / "cache"))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    MortalFileSystem.changes_left = 10**9
    MortalFileSystem.downloads.clear()


@pytest.fixture(params=["memory", "file"])
def place(request, tmp_path):
    return "memory://bucket" if request.param == "memory" else f"file://{tmp_path}/far"


def write_checkpoint(directory, number, rows=3, **facts):
    """A checkpoint whose files tell of a number, and are more or fewer with it."""
    directory.mkdir(parents=True)
    writer = CheckpointWriter(directory, lambda _: None)
    writer.text("config.json", json.dumps({"number": number}))
    writer.tensors("weights.safetensors", as_source({"w": torch.full((rows, 7), float(number))}))
    for part in range(number):
        writer.text(f"part{part}.txt", f"{part} of {number}")
    writer.within("merged").text("model.txt", f"merged {number}")
    writer.manifest({"number": number, "run_id": "r", "step": number, **facts})
    return directory


def number_in(directory):
    """The number that the files of a whole checkpoint agree on."""
    number = json.loads((directory / "config.json").read_text())["number"]
    assert load_file(directory / "weights.safetensors")["w"].unique().tolist() == [number]
    assert len(list(directory.glob("part*.txt"))) == number
    assert (directory / "merged/model.txt").read_text() == f"merged {number}"
    assert json.loads((directory / "manifest.json").read_text())["number"] == number
    return number


def test_what_is_uploaded_is_downloaded_the_same(place, tmp_path):
    upload(write_checkpoint(tmp_path / "here", 2), RemoteDirectory(f"{place}/run/epoch_0"))
    copy = local(f"{place}/run/epoch_0", whole=True)
    assert number_in(copy) == 2
    assert set(RemoteDirectory(f"{place}/run/epoch_0").files()) == {
        "config.json",
        "weights.safetensors",
        "part0.txt",
        "part1.txt",
        "merged/model.txt",
        "manifest.json",
    }


def test_directories_in_a_checkpoint_are_downloaded_only_if_they_are_wanted(place, tmp_path):
    upload(write_checkpoint(tmp_path / "here", 2), RemoteDirectory(f"{place}/epoch_0"))
    copy = local(f"{place}/epoch_0")
    assert not (copy / "merged/model.txt").exists()
    assert "merged/model.txt" not in json.loads((copy / "manifest.json").read_text())["files"]
    assert verify(copy).problems == ()
    assert number_in(local(f"{place}/epoch_0", whole=True)) == 2


def test_replacing_leaves_no_file_of_what_was_there(place, tmp_path):
    there = RemoteDirectory(f"{place}/run/epoch_0")
    upload(write_checkpoint(tmp_path / "old", 5), there)
    assert number_in(local(there.url, whole=True)) == 5
    upload(write_checkpoint(tmp_path / "new", 2), there)
    assert number_in(local(there.url, whole=True)) == 2
    assert len(there.files()) == 6


@pytest.mark.parametrize("there_before", [None, 3])
def test_whoever_is_killed_at_any_change_leaves_the_old_or_the_new_checkpoint(
    there_before, tmp_path
):
    old = None if there_before is None else write_checkpoint(tmp_path / "old", there_before)
    new = write_checkpoint(tmp_path / "new", 2)
    found = []
    for changes in range(100):
        MemoryFileSystem.store.clear()
        reading, writing = (RemoteDirectory(f"{p}://b/epoch_0") for p in ("memory", "mortal"))
        if old is not None:
            upload(old, reading)
        MortalFileSystem.changes_left = changes
        try:
            upload(new, writing)
            is_done = True
        except Killed:
            is_done = False
        generation = complete_generation(reading)
        found.append(None if generation is None else number_in(local(reading.url, whole=True)))
        # Whatever was left, the next save of that name is whole, and nothing else stays.
        MortalFileSystem.changes_left = 10**9
        upload(new, writing)
        assert number_in(local(reading.url, whole=True)) == 2
        assert len(reading.files()) == 6
        if is_done:
            break
    assert is_done
    switch = found.index(2)
    assert found == [there_before] * switch + [2] * (len(found) - switch)
    # The mark, 5 files and the manifest come before; then another mark, copies and removals.
    assert switch == 7
    assert len(found) > 8 if there_before is None else len(found) > 20


def test_part_of_an_upload_is_no_checkpoint(tmp_path):
    MortalFileSystem.changes_left = 4
    with pytest.raises(Killed):
        upload(write_checkpoint(tmp_path / "here", 2), RemoteDirectory("mortal://b/run/epoch_0"))
    assert "config.json" in RemoteDirectory("memory://b/run/epoch_0").files()
    with pytest.raises(CheckpointNotFoundError, match="only a part of one"):
        local("memory://b/run/epoch_0")
    assert RemoteOutput("memory://b/run").checkpoints() == []


def test_what_has_not_changed_is_not_downloaded_again(tmp_path):
    there = RemoteDirectory("mortal://b/epoch_0")
    upload(write_checkpoint(tmp_path / "here", 2), there)
    local(there.url, whole=True)
    assert sorted(MortalFileSystem.downloads) == [
        "config.json",
        "model.txt",
        "part0.txt",
        "part1.txt",
        "weights.safetensors",
    ]
    MortalFileSystem.downloads.clear()
    local(there.url, whole=True)
    assert MortalFileSystem.downloads == []


def test_a_copy_that_was_damaged_here_is_downloaded_again(tmp_path):
    there = RemoteDirectory("mortal://b/epoch_0")
    upload(write_checkpoint(tmp_path / "here", 2), there)
    copy = local(there.url, whole=True)
    content = (copy / "part1.txt").read_bytes()
    (copy / "part1.txt").write_bytes(bytes(len(content)))
    MortalFileSystem.downloads.clear()
    assert number_in(local(there.url, whole=True)) == 2
    assert MortalFileSystem.downloads == ["part1.txt"]
    assert (copy / "part1.txt").read_bytes() == content


def test_damage_there_is_named_and_found_by_verify(place, tmp_path):
    there = RemoteDirectory(f"{place}/epoch_0")
    upload(write_checkpoint(tmp_path / "here", 2), there)
    data = bytearray(there.read("weights.safetensors"))
    data[-1] ^= 4
    there.write("weights.safetensors", bytes(data))
    with pytest.raises(CorruptCheckpointError, match=r"epoch_0(.|\n)*the data of w\n"):
        local(there.url)
    (problem,) = verify(there.url).problems
    assert "the data of w" in problem
    there.remove(["part0.txt"])
    assert len(verify(there.url).problems) == 2
    there.write("model.bin", b"another")
    assert any("not in manifest.json" in problem for problem in verify(there.url).problems)


def test_of_a_directory_that_is_none_of_ours_the_files_in_it_are_read(place):
    there = RemoteDirectory(f"{place}/base")
    for name in ("config.json", "original/consolidated.00.pth", "a/../../escaped.json"):
        there.write(name, name.encode())
    copy = local(there.url)
    visible = [path.name for path in copy.iterdir() if not path.name.startswith(".")]
    assert visible == ["config.json"]
    there.write("config.json", b"another content")
    assert (local(there.url) / "config.json").read_text() == "another content"
    there.remove(["config.json"])
    there.write("params.json", b"1")
    assert not (local(there.url) / "config.json").exists()


def test_a_file_is_read_with_the_manifest_beside_it_and_nothing_else(tmp_path):
    there = RemoteDirectory("mortal://b/epoch_0")
    upload(write_checkpoint(tmp_path / "here", 2), there)
    file = local(f"{there.url}/part1.txt")
    assert file.read_text() == "1 of 2"
    assert MortalFileSystem.downloads == ["part1.txt"]
    assert verify(file.parent).files == 1
    copy = local(there.url, whole=True)
    assert local(f"{there.url}/part1.txt") == file
    assert number_in(copy) == 2


def test_what_is_not_there_is_said_with_its_url(place):
    with pytest.raises(CheckpointNotFoundError, match="base: there is neither"):
        local(f"{place}/base")


def test_a_url_that_became_a_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="as a string"):
        local(Path("s3://bucket/run"))
    with pytest.raises(ConfigError, match="as a string"):
        FullModelHFCheckpointer(tmp_path, output_dir=Path("s3://bucket/run"))
    assert path_or_url("s3://bucket/run") == "s3://bucket/run"
    assert path_or_url("out/run") == Path("out/run")


def test_an_unknown_protocol_and_a_missing_package_are_said():
    with pytest.raises(ConfigError, match=r"protocol of fsspec, such as s3://"):
        local("nonsense://bucket/run")
    if "gcsfs" not in sys.modules:
        with pytest.raises(ConfigError, match="gcsfs"):
            local("gs://bucket/run")


def test_nothing_is_written_where_there_is_something_else(place, tmp_path):
    there = RemoteDirectory(f"{place}/out")
    there.write("precious.txt", b"1")
    base = write_base(tmp_path)
    for overwrite in ((), ("--overwrite",)):
        assert main(["convert", str(base), there.url, "--to", "tune", *overwrite]) == 1
    assert set(there.files()) == {"precious.txt"}


def test_what_a_block_writes_is_uploaded_when_it_ends_well(place, tmp_path):
    with pytest.raises(ZeroDivisionError), published(f"{place}/out") as directory:
        write_checkpoint(directory, 2)
        raise ZeroDivisionError
    assert RemoteDirectory(f"{place}/out").files() == {}


def test_retention_removes_what_its_run_has_saved_and_nothing_else(place, tmp_path):
    output = RemoteOutput(f"{place}/run")
    write_checkpoint(output.directory / "other", 1, run_id="another")
    write_checkpoint(output.directory / "converted", 6, run_id=None)
    output.upload(output.directory / "other")
    RemoteDirectory(f"{place}/run/notes").write("a.txt", b"1")
    for step in (2, 3, 4):
        saved = write_checkpoint(output.directory / f"step_{step}", step)
        output.upload(saved)
        output.remove_old(Retention(last=2), "r", saved)
    names = [each.directory.name for each in output.checkpoints()]
    assert names == ["other", "step_3", "step_4"]
    assert RemoteDirectory(f"{place}/run").directories() == ["notes", "other", "step_3", "step_4"]
    # The last one stays here, and what was never uploaded.
    here = {path.parent.name for path in output.directory.glob("*/manifest.json")}
    assert here == {"converted", "step_4"}


def test_a_removal_that_was_cut_short_is_never_a_checkpoint_and_is_finished(tmp_path):
    for changes in range(20):
        MemoryFileSystem.store.clear()
        output, mortal = RemoteOutput("memory://b/run"), RemoteOutput("mortal://b/run")
        for step in (2, 3):
            upload(
                write_checkpoint(tmp_path / f"{changes}" / f"step_{step}", step),
                RemoteDirectory(f"memory://b/run/step_{step}"),
            )
        last = mortal.directory / "step_3"
        MortalFileSystem.changes_left = changes
        try:
            mortal.remove_old(Retention(last=1), "r", last)
            is_done = True
        except Killed:
            is_done = False
        for name in {each.directory.name for each in output.checkpoints()}:
            assert number_in(local(f"memory://b/run/{name}", whole=True)) == int(name[-1])
        MortalFileSystem.changes_left = 10**9
        mortal.remove_old(Retention(last=1), "r", last)
        there = RemoteDirectory("memory://b/run").files()
        assert {name.partition("/")[0] for name in there} == {"step_3"}
        if is_done:
            break
    assert is_done and changes > 6


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(place, tmp_path, caplog):
    output = RemoteOutput(f"{place}/run")
    for step in (2, 3):
        output.upload(write_checkpoint(output.directory / f"step_{step}", step))
    RemoteDirectory(f"{place}/run/step_3").write("part1.txt", b"2 of 3")
    newest = RemoteOutput(f"{place}/run").fetch_newest()
    assert json.loads((newest.directory / "config.json").read_text()) == {"number": 2}
    assert "NOT RESUMED FROM" in caplog.text


def test_output_and_base_may_not_lie_in_each_other(place, tmp_path):
    base = RemoteDirectory(f"{place}/base")
    base.write("config.json", b"{}")
    for output in (base.url, f"{base.url}/out", place):
        with pytest.raises(ConfigError, match="lie in each other"):
            FullModelHFCheckpointer(base.url, output_dir=output)


def test_a_checkpointer_saves_to_a_url_and_resumes_from_it(place, tmp_path, monkeypatch):
    base = write_base(tmp_path)
    arguments = {"checkpoint_dir": base, "output_dir": f"{place}/run"}
    checkpointer = FullModelHFCheckpointer(**arguments)
    state = checkpointer.load_checkpoint()
    saved = checkpointer.save_checkpoint({**state, "steps_run": 3}, epoch=0, step=3)
    background = AsyncCheckpointer(FullModelHFCheckpointer(**arguments))
    background.save_checkpoint({**state, "steps_run": 5}, epoch=1, step=5)
    background.wait()
    assert RemoteDirectory(f"{place}/run").directories() == ["epoch_0", "epoch_1"]
    monkeypatch.setenv("TUNEPOINT_CACHE", str(tmp_path / "other_machine"))
    for resume, steps in ((True, 5), (f"{place}/run/epoch_0", 3), (str(saved), 3)):
        resumed = FullModelHFCheckpointer(**arguments, should_load_recipe_state=resume)
        loaded = resumed.load_checkpoint()
        assert loaded["steps_run"] == steps
        assert runs.same(loaded["model"], state["model"])


# A real S3 server.


@pytest.fixture(scope="module")
def server():
    with s3_server() as port:
        yield port


@pytest.fixture
def line(server, monkeypatch):
    line = Line(server)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
    fs = fresh_s3()
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    yield line
    line.close()
    fsspec.filesystem("s3").clear_instance_cache()


def fresh_s3():
    """A file system that uses the endpoint that the environment names now."""
    fs = fsspec.get_filesystem_class("s3")
    fs.clear_instance_cache()
    return fsspec.filesystem("s3")


def retry_no_more(monkeypatch):
    """Keeps the libraries below from trying again too."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(type(fresh_s3()), "retries", 1)


def write_base(tmp_path):
    return runs.write_base(tmp_path / "base")


def put(directory, url):
    fsspec.filesystem(url.partition("://")[0]).put(f"{directory}/", url, recursive=True)


def test_on_s3_the_manifest_is_written_last_and_what_is_read_is_the_same(line, tmp_path):
    there = RemoteDirectory("s3://bucket/run/epoch_0")
    upload(write_checkpoint(tmp_path / "old", 3), there)
    assert number_in(local(there.url, whole=True)) == 3
    assert line.puts[1].endswith("/.incomplete")  # after the bucket
    assert line.puts[-1].endswith("/epoch_0/manifest.json")
    upload(write_checkpoint(tmp_path / "new", 2), there)
    assert number_in(local(there.url, whole=True)) == 2
    assert len(there.files()) == 6
    assert verify(there.url).problems == ()


def test_a_connection_that_breaks_is_tried_again(line, tmp_path):
    line.cut, line.cuts, line.cut_after = "weights.safetensors", 2, 1_000_003
    there = RemoteDirectory("s3://bucket/run/epoch_0")
    upload(write_checkpoint(tmp_path / "here", 2, rows=100_003), there)
    assert line.cuts == 0
    assert number_in(local(there.url, whole=True)) == 2


def test_a_connection_that_stays_broken_commits_nothing_and_says_where_the_checkpoint_is(
    line, tmp_path, monkeypatch
):
    retry_no_more(monkeypatch)
    there = RemoteDirectory("s3://bucket/run/epoch_0")
    here = write_checkpoint(tmp_path / "here", 2)
    line.cut, line.cuts = "part1.txt", 10**9
    with pytest.raises(WriteError) as error:
        upload(here, there)
    assert str(here) in str(error.value)
    assert "part1.txt cannot be uploaded" in str(error.value)
    assert "manifest.json" not in there.files()
    with pytest.raises(CheckpointNotFoundError, match="only a part"):
        local(there.url)
    line.cuts = 0
    upload(here, there)
    line.cuts = 10**9
    with pytest.raises(WriteError, match="that was there before is as it was"):
        upload(write_checkpoint(tmp_path / "new", 4), there)
    assert number_in(local(there.url, whole=True)) == 2


def test_a_server_that_is_not_there_is_said(monkeypatch, tmp_path):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    retry_no_more(monkeypatch)
    with pytest.raises(RemoteError, match=r"s3://bucket/run: cannot be listed.*check the network"):
        local("s3://bucket/run")


def test_the_commands_take_urls(line, tmp_path, capsys):
    base = write_base(tmp_path)
    put(base, "s3://bucket/base")
    assert main(["convert", "s3://bucket/base", "s3://bucket/native", "--to", "tune"]) == 0
    assert main(["convert", str(base), str(tmp_path / "native"), "--to", "tune"]) == 0
    assert main(["diff", "s3://bucket/native", str(tmp_path / "native")]) == 0
    assert main(["diff", "s3://bucket/base", "s3://bucket/native"]) == 0
    assert main(["verify", "s3://bucket/native"]) == 0
    assert main(["convert", str(base), "s3://bucket/native", "--to", "tune"]) == 1
    assert main(["convert", str(base), "s3://bucket/native", "--to", "tune", "--overwrite"]) == 0
    assert main(["inspect", "s3://bucket/native", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "s3://bucket/native: intact" in printed
    facts = json.loads(printed[printed.index("{") :])
    assert facts["path"] == "s3://bucket/native"
    assert facts["checkpoint"]["converted_from"]["directory"] == str(base)
    assert main(["convert", "s3://bucket/base", "s3://bucket/base/in", "--to", "tune"]) == 1
    assert "lie in each other" in capsys.readouterr().err


@pytest.mark.slow
def test_a_large_file_goes_in_parts_and_leaves_none_when_the_line_stays_broken(line, tmp_path):
    there = RemoteDirectory("s3://bucket/run/epoch_0")
    here = write_checkpoint(tmp_path / "here", 2, rows=4_000_037)
    line.cut, line.cuts, line.cut_after = "partNumber=2", 1, 20_000_003
    upload(here, there)
    assert line.cuts == 0
    assert number_in(local(there.url, whole=True)) == 2
    line.cuts = 10**9
    with pytest.raises(WriteError, match="as it was"):
        upload(write_checkpoint(tmp_path / "new", 3, rows=4_000_037), there)
    assert number_in(local(there.url, whole=True)) == 2
    left = fresh_s3().call_s3("list_multipart_uploads", Bucket="bucket")
    assert not left.get("Uploads")


def run_command(kind, tmp_path, *overrides):
    file = tmp_path / "config" / "recipe.yaml"
    if not file.is_file():
        runs.recipe_config(kind, tmp_path / "base", file.parent)
    return [
        *(sys.executable, "-m", "checkpointing", "run", f"{kind}_finetune_single_device"),
        *("--config", str(file), "output_dir=s3://bucket/run", "save_every_n_steps=2"),
        *("checkpointer.checkpoint_dir=s3://bucket/base", "tokenizer.path=s3://bucket/base"),
        *("dataset.source=s3://bucket/base/rows.jsonl", *overrides),
    ]


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_in_an_upload_resumes_on_another_machine_bit_for_bit(
    kind, line, tmp_path
):
    base = write_base(tmp_path)
    put(base, "s3://bucket/base")
    line.hang = "step_6/recipe_state"
    process = subprocess.Popen(
        run_command(kind, tmp_path), env=environment(), start_new_session=True
    )
    while not line.hanging.wait(0.1):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    names = {each.directory.name for each in RemoteOutput("s3://bucket/run").checkpoints()}
    assert names == {"step_2", "epoch_0"}
    assert RemoteDirectory("s3://bucket/run/step_6").files()

    line.hang = ""
    other = environment({"TUNEPOINT_CACHE": str(tmp_path / "other_machine")})
    resumed = subprocess.run(
        run_command(kind, tmp_path, "resume_from_checkpoint=True"),
        env=other,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "Checkpoint: s3://bucket/run/epoch_1\n" in resumed.stdout
    names = {each.directory.name for each in RemoteOutput("s3://bucket/run").checkpoints()}
    assert names == {"step_2", "epoch_0", "step_6", "epoch_1"}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs.run(kind, base, tmp_path / "reference")
    torch.set_num_threads(threads)
    ours = local("s3://bucket/run/epoch_1", whole=True)
    assert runs.same(runs.weights(ours), runs.weights(tmp_path / "reference" / "epoch_1"))
    losses = {step: line["loss"] for step, line in runs.metrics(tmp_path / "reference").items()}
    log = local("s3://bucket/run/logs/metrics.jsonl").read_text().splitlines()
    assert {row["step"]: row["loss"] for row in map(json.loads, log)} == {
        step: losses[step] for step in (5, 6, 7, 8)
    }
    manifest = json.loads((ours / "manifest.json").read_text())
    assert manifest["step"] == 8
    assert "base" not in manifest or manifest["base"]["url"] == "s3://bucket/base"


def test_the_commands_take_urls_of_adapters(line, tmp_path, capsys):
    base = write_base(tmp_path)
    put(base, "s3://bucket/base")
    runs.run("lora", base, tmp_path / "config", "output_dir=s3://bucket/run", "epochs=1")
    adapter = "s3://bucket/run/epoch_0"
    assert main(["merge", "s3://bucket/base", adapter, "s3://bucket/merged"]) == 0
    merged = runs.weights(local(adapter, whole=True) / "merged")
    assert runs.same(runs.weights(local("s3://bucket/merged")), merged)
    peft = ["s3://bucket/peft", "--to", "peft", "--base", "s3://bucket/base"]
    peft += ["--adapter-form", "exact"]
    assert main(["convert", adapter, *peft]) == 0
    assert main(["diff", adapter, "s3://bucket/peft", "--base", "s3://bucket/base"]) == 0
    assert main(["inspect", adapter, "--base", "s3://bucket/base"]) == 0
    assert main(["parity", adapter, "--base", "s3://bucket/base"]) == 0
    assert main(["push", adapter, "owner/name", "--merged", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "model.safetensors.index.json" in printed.out
    assert str(tmp_path) not in printed.out.partition("README.md:\n")[2]
    started = FullModelHFCheckpointer("s3://bucket/base", adapter_checkpoint=adapter)
    named = FullModelHFCheckpointer(base, adapter_checkpoint=f"{adapter}/adapter_model.pt")
    assert runs.same(started.load_checkpoint()["adapter"], named.load_checkpoint()["adapter"])
