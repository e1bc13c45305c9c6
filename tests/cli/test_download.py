"""`tune download REPO`, with huggingface_hub itself, against a server on the loopback interface."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import tune
from tests.cli.hub import Hub, serving

FILES = {
    "config.json": b'{"hidden_size": 48}',
    "model.safetensors": bytes(range(256)) * 5,
    "original/consolidated.00.pth": b"meta",
    "original/params.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    repositories = {"owner/model": dict(FILES), "owner/gated": dict(FILES)}
    with serving(Hub(repositories, tokens={"hf_right"}, gated={"owner/gated"})) as running:
        yield running


def download(hub: Hub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_TOKEN": "",
        "TUNEPOINT_CACHE": str(tmp_path / "cache"),
    }
    return tune("download", *arguments, cwd=tmp_path, env=env)


def visible_files(directory: Path) -> set[str]:
    names = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return {name.as_posix() for name in names if not name.parts[0].startswith(".")}


def test_a_repository_comes_into_the_cache_with_its_name_noted(hub: Hub, tmp_path: Path) -> None:
    done = download(hub, tmp_path, "owner/model")
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "cache" / "model"
    assert str(directory) in done.stdout
    assert visible_files(directory) == {*FILES, "original_repo_id.json"}
    assert all((directory / name).read_bytes() == content for name, content in FILES.items())
    assert json.loads((directory / "original_repo_id.json").read_text()) == {
        "repo_id": "owner/model"
    }


def test_files_can_be_left_out_and_the_directory_chosen(hub: Hub, tmp_path: Path) -> None:
    patterns = ["--ignore-patterns", "original/*", "--ignore-patterns", "config.*"]
    done = download(hub, tmp_path, "owner/model", "--output-dir", "here", *patterns)
    assert done.returncode == 0, done.stderr
    assert visible_files(tmp_path / "here") == {"model.safetensors", "original_repo_id.json"}
    assert hub.fetched == ["model.safetensors"]


def test_a_second_download_fetches_nothing_again(hub: Hub, tmp_path: Path) -> None:
    assert download(hub, tmp_path, "owner/model").returncode == 0
    hub.fetched.clear()
    assert download(hub, tmp_path, "owner/model").returncode == 0
    assert hub.fetched == []


def test_a_gated_repository_needs_a_token_and_the_error_says_where_to_get_access(
    hub: Hub, tmp_path: Path
) -> None:
    done = download(hub, tmp_path, "owner/gated")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: owner/gated is gated: accept its licence"
    )
    assert f"{hub.url}/owner/gated" in done.stderr
    assert "--hf-token" in done.stderr
    assert "Traceback" not in done.stderr
    assert visible_files(tmp_path / "cache" / "gated") == set()
    done = download(hub, tmp_path, "owner/gated", "--hf-token", "hf_right")
    assert done.returncode == 0, done.stderr
    assert visible_files(tmp_path / "cache" / "gated") == {*FILES, "original_repo_id.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["owner/modl"], "owner/modl: the Hub refuses access (401)"),
        (["owner/modl", "--hf-token", "hf_right"], "owner/modl: the Hub has no such repository"),
        (["a/b/c"], "'a/b/c' is not a repository's name, owner/name"),
    ],
)
def test_a_repository_that_does_not_exist_is_one_clear_error(
    hub: Hub, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = download(hub, tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "cache").exists()


def test_without_a_network_an_old_directory_is_not_taken_for_the_download(tmp_path: Path) -> None:
    with serving(Hub({"owner/model": dict(FILES)})) as hub:
        pass
    (tmp_path / "cache" / "model").mkdir(parents=True)
    (tmp_path / "cache" / "model" / "config.json").write_text("{}")
    done = download(hub, tmp_path, "owner/model")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot reach {hub.url}")
    assert "check the network" in done.stderr
    assert visible_files(tmp_path / "cache" / "model") == {"config.json"}


def test_a_directory_that_cannot_be_written_is_an_error_with_its_path(
    hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = download(hub, tmp_path, "owner/model", "--output-dir", "file/model")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "file/model" in done.stderr
    assert "Traceback" not in done.stderr
