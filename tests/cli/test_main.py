"""The command as a whole: help, errors and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.cli.main import main
from tests.cli.command import environment, tune


def test_help_names_every_command() -> None:
    done = tune("--help")
    assert done.returncode == 0
    for command in ("download", "ls", "cp", "cat", "validate", "run", "parity"):
        assert f"\n    {command} " in done.stdout


def test_an_error_is_one_line_without_a_traceback_and_exit_code_1() -> None:
    done = tune("cat", "no_such_config")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no config 'no_such_config'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], before: bool) -> None:
    arguments = ["cat", "no_such_config"]
    assert main(["--debug", *arguments] if before else [*arguments, "--debug"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "\nerror: there is no config" in shown


def test_the_environment_can_ask_for_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_DEBUG", "1")
    assert main(["cat", "no_such_config"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["lst"],
        ["ls", "extra"],
        ["run", "recipe", "--config", "c", "--batch-size", "3"],
        ["run", "recipe"],
        ["cat", "c", "a=b"],
    ],
)
def test_a_command_line_that_cannot_be_read_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: tune" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["ls"], ["cat", "smollm2/135M_lora_single_device", "--sort"], ["--help"]]
)
def test_what_only_lists_files_starts_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from checkpointing.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_reader_that_stops_early_gets_no_traceback(tmp_path: Path) -> None:
    config = tmp_path / "long.yaml"
    config.write_text("".join(f"key_{i}: {'x' * 100}\n" for i in range(5000)))
    with subprocess.Popen(
        [sys.executable, "-m", "checkpointing", "cat", str(config)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("key_0")
        process.stdout.close()
        assert process.stderr.read() == ""
