"""Every shipped config trains a tiny model of its family, through all that it names."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from checkpointing.cli.catalog import Entry, configs, recipe_of
from checkpointing.cli.main import main
from checkpointing.families import MODEL_TYPES
from tests.families.variants import SIZES, VARIANTS, random_model
from tests.training import runs
from tests.training.distributed_runs import Team

CONFIGS = [pytest.param(config, id=config.name) for config in configs()]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each family a tiny model with the tokenizer and the data of the other tests."""
    directories = {}
    for family in set(MODEL_TYPES.values()) & VARIANTS.keys():
        directory = directories[family] = runs.write_base(tmp_path_factory.mktemp(family))
        options = {**SIZES, **VARIANTS[family][1], "vocab_size": runs.MODEL.dims.vocab}
        random_model(family, options).save_pretrained(directory)
    return directories


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Two processes, for the configs of distributed recipes."""
    started = Team(2, tmp_path_factory.mktemp("team"))
    yield started
    started.stop()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_shipped_config_trains_one_step_and_saves(
    config: Entry, bases: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    recipe = recipe_of(config.name)
    assert recipe is not None
    loaded = OmegaConf.load(config.path)
    model = bases[MODEL_TYPES[loaded.checkpointer.get("model_type", "LLAMA3")]]
    overrides = [
        f"checkpointer.checkpoint_dir={model}",
        f"output_dir={tmp_path}/out",
        "max_steps_per_epoch=1",
        "epochs=1",
        "device=cpu",
    ]
    if "source" in loaded.dataset:
        overrides.append(f"dataset.source={model}/rows.jsonl")
    command = ["run", recipe.name, "--config", config.name, *overrides]
    if recipe.name.endswith("_distributed"):
        team: Team = request.getfixturevalue("team")
        assert team.tune(*command) == [0, 0]
    else:
        assert main(command) == 0
    saved = tmp_path / "out" / "epoch_0"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["step"], manifest["format"]) == (1, "hf")
    where = saved / "merged" if "lora_" in config.name else saved
    assert (where / "model.safetensors.index.json").is_file()
