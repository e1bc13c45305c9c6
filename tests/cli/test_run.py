"""`tune run` and `tune validate`, with recipes and configs of the user's own and shipped ones."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.cli.main import main
from tests.cli.command import environment, tune

RECIPE = '''
"""A recipe that writes down what it was given."""

import helper

CONFIG_KEYS = frozenset({"output_dir", "batch_size", "optimizer", "note"})


def main(cfg):
    helper.write(cfg)
'''
HELPER = """
from pathlib import Path

from omegaconf import OmegaConf


class Local:
    def __init__(self, size):
        self.size = size


def write(cfg):
    Path(cfg.output_dir, "seen.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
"""
CONFIG = """
output_dir: {output_dir}
batch_size: 2
optimizer: {{_component_: torch.optim.SGD, lr: 3e-4}}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with a recipe, a module beside it, and a config."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "config.yaml").write_text(CONFIG.format(output_dir=tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def import_state_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is large is imported before, since some of it cannot be imported twice.
    importlib.import_module("checkpointing.training")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_a_recipe_and_a_config_by_path_run_with_the_overrides(own: Path) -> None:
    elsewhere = own / "elsewhere"
    elsewhere.mkdir()
    done = tune(
        "run",
        "../recipe.py",
        "note=a=b",
        "--config",
        "../config.yaml",
        "~batch_size",
        cwd=elsewhere,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (own / "seen.yaml").read_text() == (
        f"output_dir: {own}\noptimizer:\n  _component_: torch.optim.SGD\n  lr: 0.0003\nnote: a=b\n"
    )


def test_the_keys_of_a_recipe_of_ones_own_are_checked(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(own / "recipe.py"), "--config", str(own / "config.yaml")]
    assert main([*arguments, "bach_size=3"]) == 1
    assert "did you mean 'batch_size'?" in capsys.readouterr().err
    assert not (own / "seen.yaml").exists()


def test_without_declared_keys_a_recipe_gets_what_the_config_and_plus_say(own: Path) -> None:
    recipe = own / "recipe.py"
    recipe.write_text(RECIPE.replace("CONFIG_KEYS", "OTHER"))
    assert main(["run", str(recipe), "--config", str(own / "config.yaml"), "+mine=1"]) == 0
    assert "mine: 1" in (own / "seen.yaml").read_text()


def test_a_recipe_has_a_function_main(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "recipe.py").write_text("x = 1\n")
    assert main(["run", str(own / "recipe.py"), "--config", str(own / "config.yaml")]) == 1
    assert "no function main(cfg)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "config", "message"),
    [
        (
            "lora_finetune_single_devise",
            "smollm2/135M_lora_single_device",
            "no recipe 'lora_finetune_single_devise'; did you mean 'lora_finetune_single_device'?",
        ),
        (
            "lora_finetune_single_device",
            "smollm/135M_lora_single_device",
            "no config 'smollm/135M_lora_single_device'; "
            "did you mean 'smollm2/135M_lora_single_device'?",
        ),
        ("absent.py", "smollm2/135M_lora_single_device", "absent.py does not exist"),
        ("lora_finetune_single_device", "absent.yaml", "absent.yaml does not exist"),
        (
            "full_finetune_single_device",
            "smollm2/135M_lora_single_device",
            "tune run lora_finetune_single_device --config smollm2/135M_lora_single_device",
        ),
    ],
)
def test_a_wrong_name_is_an_error_with_the_right_one(
    capsys: pytest.CaptureFixture[str], recipe: str, config: str, message: str
) -> None:
    assert main(["run", recipe, "--config", config]) == 1
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_downloaded_is_an_error_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNEPOINT_CACHE", str(tmp_path / "nothing"))
    config = "smollm2/135M_lora_single_device"
    assert main(["run", "lora_finetune_single_device", "--config", config]) == 1
    shown = capsys.readouterr().err
    assert str(tmp_path / "nothing" / "SmolLM2-135M-Instruct") in shown
    assert f"tune cat {config}" in shown


@pytest.mark.parametrize("saved", [True, False])
def test_after_ctrl_c_a_line_says_how_to_go_on_and_the_exit_code_is_130(
    own: Path, saved: bool
) -> None:
    (own / "recipe.py").write_text(
        "import time\n\n\ndef main(cfg):\n    print('started', flush=True)\n    time.sleep(60)\n"
    )
    if saved:
        (own / "step_20").mkdir()
        (own / "step_20" / "manifest.json").write_text("{}")
    command = ["run", "recipe.py", "--config", "config.yaml", "output_dir=."]
    again = "tune " + " ".join(command)
    if saved:
        # It would go back to the checkpoint that it started from.
        command.append("+resume_from_checkpoint=step_10")
    with subprocess.Popen(
        [sys.executable, "-m", "checkpointing", *command],
        cwd=own,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Not ignored, as a shell has it for what it runs in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        os.kill(process.pid, signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    if saved:
        assert shown.strip() == (
            f"interrupted; go on from the last checkpoint with: {again} resume_from_checkpoint=True"
        )
    else:
        assert shown.strip() == (
            f"interrupted before the first checkpoint; start again with: {again}"
        )


# Validation


def test_a_config_of_ones_own_is_valid_with_components_of_the_working_directory(
    own: Path,
) -> None:
    done = tune("validate", "config.yaml", "+model={_component_: helper.Local, size: 3}", cwd=own)
    assert (done.returncode, done.stderr) == (0, "")
    assert "well-formed" in done.stdout


def test_validation_shows_every_problem(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (own / "config.yaml").open("a") as file:
        file.write("a: {_component_: torch.optim.AdmW}\nb: {_component_: torch.optim.SGD, l: 1}\n")
    assert main(["validate", str(own / "config.yaml")]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: the config has 2 problems\n  - a: torch.optim.AdmW")
    assert "\n  - b: torch.optim.SGD has no argument 'l'" in shown


def test_validation_knows_the_keys_of_the_recipe_that_is_named(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["validate", str(own / "config.yaml"), "--recipe", str(own / "recipe.py")]
    assert main(arguments) == 0
    assert main([*arguments, "notte=1"]) == 1
    assert "did you mean 'note'?" in capsys.readouterr().err


def test_a_copied_config_is_checked_for_the_recipe_that_its_name_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "my_lora_single_device.yaml"
    assert main(["cp", "smollm2/135M_lora_single_device", str(copy)]) == 0
    assert main(["validate", str(copy)]) == 0
    copy.write_text(copy.read_text().replace("epochs:", "epohcs:"))
    assert main(["validate", str(copy)]) == 1
    assert "'epohcs'; did you mean 'epochs'?" in capsys.readouterr().err
