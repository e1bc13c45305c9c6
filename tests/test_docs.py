"""The documents say what the code does: their commands and code blocks are run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from tests.tiny import random_adapter, write_hf
from tests.training.peers import config, hf_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(path: str, language: str) -> list[str]:
    """The code blocks of a document, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def test_continuous_integration_runs_the_readmes_test_command_to_the_letter():
    command = next(line for line in README.splitlines() if "pytest" in line and "&&" in line)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_each_of_the_two_commands_is_one_line_that_sets_up_all_it_needs():
    commands = [block for block in blocks("README.md", "bash") if "python3 -m venv" in block]
    assert len(commands) == 2
    assert all(len(command.strip().splitlines()) == 1 for command in commands)


def test_the_code_in_docs_checkpointers_runs_as_it_stands(tmp_path):
    write_hf(hf_model(config()), tmp_path / "base")
    code = blocks("docs/checkpointers.md", "python")
    assert len(code) == 8
    for block in code:
        run = subprocess.run(
            [sys.executable, "-c", block],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "out" / "lora" / "epoch_0" / "merged" / "config.json").exists()


def test_the_code_in_docs_rollout_runs_from_top_to_bottom(tmp_path):
    save_adapter(write_hf(hf_model(config()), tmp_path / "base"), tmp_path / "out" / "lora")
    code = blocks("docs/rollout.md", "python")
    assert len(code) == 5
    run = subprocess.run(
        [sys.executable, "-c", "".join(code)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_the_commands_in_docs_convert_run_as_they_stand(tmp_path, monkeypatch):
    from checkpointing.cli.main import main

    save_adapter(write_hf(hf_model(config()), tmp_path / "base"), tmp_path / "out" / "lora")
    monkeypatch.chdir(tmp_path)
    commands = "".join(blocks("docs/convert.md", "bash")).splitlines()
    assert len(commands) == 20
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "tune"
        assert main(arguments) == 0, command
    assert (tmp_path / "out" / "merged" / "config.json").exists()


def save_adapter(base: Path, output_dir: Path) -> None:
    """A checkpoint of an adapter run, `epoch_0` in the directory."""
    adapter_config = AdapterConfig(r=4, alpha=6.0, target_modules=("q_proj", "v_proj"))
    state = {
        "adapter": random_adapter(config().dims, adapter_config),
        "adapter_config": adapter_config.to_state(),
    }
    checkpointer = FullModelHFCheckpointer(base, output_dir=output_dir)
    checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/checkpointers.md",
        "docs/architecture.md",
        "docs/convert.md",
        "docs/distributed.md",
        "docs/scale.md",
        "docs/performance.md",
        "docs/push.md",
        "docs/remote.md",
        "docs/rollout.md",
    ],
)
def test_links_between_the_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
        assert ((ROOT / document).parent / target).exists(), target


def tune_commands() -> list[list[str]]:
    documents = ("README.md", "docs/distributed.md")
    lines = [line for name in documents for b in blocks(name, "bash") for line in b.splitlines()]
    parts = [part.strip().removeprefix(".venv/bin/") for line in lines for part in line.split("&&")]
    return [shlex.split(part)[1:] for part in parts if part.startswith("tune ")]


@pytest.mark.parametrize("command", tune_commands(), ids=" ".join)
def test_every_tune_command_of_the_documents_is_one_that_the_parser_takes(command):
    from checkpointing.cli.main import build_parser

    args, rest = build_parser().parse_known_args(command)
    assert all("=" in override for override in rest)
    if command[0] in ("run", "cp"):
        names = {"run": getattr(args, "recipe", ""), "cp": command[1]}
        shipped = {path.stem for path in ROOT.glob("recipes/*.py")} | {
            path.relative_to(ROOT / "configs").with_suffix("").as_posix()
            for path in ROOT.glob("configs/*/*.yaml")
        }
        assert names[command[0]] in {*shipped, "my_recipe.py"}
