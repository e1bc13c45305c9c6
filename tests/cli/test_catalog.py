"""`tune ls`, `tune cp` and `tune cat`: the shipped recipes and configs."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from checkpointing.cli.catalog import configs, recipe_of, recipes
from checkpointing.cli.main import main
from tests.cli.command import ROOT, tune

# Recipes, and what the names of their configs end in.
KINDS = {
    "full_finetune_distributed": "full_distributed",
    "full_finetune_single_device": "full_single_device",
    "grpo_lora_distributed": "grpo_lora_distributed",
    "grpo_lora_single_device": "grpo_lora_single_device",
    "lora_finetune_distributed": "lora_distributed",
    "lora_finetune_single_device": "lora_single_device",
}
LORA = "lora_finetune_single_device"
LORA_CONFIG = "smollm2/135M_lora_single_device"


def test_ls_shows_every_recipe_with_its_configs_and_descriptions_below() -> None:
    done = tune("ls")
    assert done.returncode == 0
    blocks = [block.splitlines() for block in done.stdout.strip().split("\n\n")]
    names = [[line.split()[0] for line in block] for block in blocks]
    files = [path.relative_to(ROOT / "configs") for path in ROOT.glob("configs/*/*.yaml")]
    assert len(files) == 84
    assert names == [
        [recipe, *sorted(str(path.with_suffix("")) for path in files if kind == _kind(path))]
        for recipe, kind in KINDS.items()
    ]
    assert all(len(line.split()) > 3 for block in blocks for line in block)


def _kind(config: Path) -> str:
    """A config's name without the size of the model, such as 135M or mini_128k."""
    return re.sub(r"^.*?_q?(?=full_|lora_|grpo_)", "", config.stem)


def test_every_config_belongs_to_the_recipe_that_its_name_tells() -> None:
    assert {recipe.name for recipe in recipes()} == KINDS.keys()
    for config in configs():
        recipe = recipe_of(config.name)
        assert recipe is not None
        for word in ("lora", "grpo", "distributed"):
            assert (word in recipe.name) == (word in config.name)


@pytest.mark.parametrize(
    ("name", "source", "destination", "made"),
    [
        (LORA, f"recipes/{LORA}.py", "mine.py", "mine.py"),
        (LORA, f"recipes/{LORA}.py", "mine", "mine.py"),
        (LORA, f"recipes/{LORA}.py", "mine.v2", "mine.v2.py"),
        (LORA, f"recipes/{LORA}.py", ".", f"{LORA}.py"),
        (LORA_CONFIG, f"configs/{LORA_CONFIG}.yaml", "mine.yaml", "mine.yaml"),
        (LORA_CONFIG, f"configs/{LORA_CONFIG}.yaml", "mine.yml", "mine.yml"),
        (LORA_CONFIG, f"configs/{LORA_CONFIG}.yaml", "mine", "mine.yaml"),
        (LORA_CONFIG, f"configs/{LORA_CONFIG}.yaml", ".", "135M_lora_single_device.yaml"),
    ],
)
def test_cp_copies_with_the_right_suffix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    source: str,
    destination: str,
    made: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", name, destination]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [made]
    assert (tmp_path / made).read_bytes() == (ROOT / source).read_bytes()


def test_cp_overwrites_unless_told_not_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("mine: 1\n")
    assert main(["cp", "-n", LORA_CONFIG, str(mine)]) == 0
    assert "not overwritten" in capsys.readouterr().out
    assert mine.read_text() == "mine: 1\n"
    assert main(["cp", LORA_CONFIG, str(mine)]) == 0
    assert mine.read_text().startswith("# LoRA")


def test_cp_makes_directories_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "a" / "b" / "mine.yaml"
    assert main(["cp", LORA_CONFIG, str(mine)]) == 1
    assert "--make-parents" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main(["cp", LORA_CONFIG, str(mine), "--make-parents"]) == 0
    assert mine.is_file()


@pytest.mark.parametrize("name", ["lora_finetune_single_devise", "smollm2/135M_lora_single_devise"])
def test_cp_of_an_unknown_name_tells_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["cp", name, str(tmp_path / "x")]) == 1
    assert f"did you mean '{name.replace('devise', 'device')}'?" in capsys.readouterr().err


def test_cat_prints_the_file_with_its_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", LORA_CONFIG]) == 0
    assert capsys.readouterr().out == (ROOT / f"configs/{LORA_CONFIG}.yaml").read_text()


def test_cat_can_sort_the_keys_and_keeps_references(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", LORA_CONFIG, "--sort"]) == 0
    printed = capsys.readouterr().out
    keys = [line.partition(":")[0] for line in printed.splitlines() if line[0] not in " -"]
    assert keys == sorted(keys)
    original = OmegaConf.load(ROOT / f"configs/{LORA_CONFIG}.yaml")
    assert OmegaConf.create(printed) == original
    assert "${output_dir}" in printed


def test_cat_takes_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("b: 1\na: 2\n")
    assert main(["cat", str(tmp_path / "own.yaml"), "--sort"]) == 0
    assert capsys.readouterr().out == "a: 2\nb: 1\n"


def test_cat_of_a_recipe_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", LORA]) == 1
    assert "is a recipe, not a config" in capsys.readouterr().err
