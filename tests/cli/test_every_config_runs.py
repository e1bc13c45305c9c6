"""Every shipped config trains a tiny model of its family, through all that it names."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from checkpointing.cli.catalog import Entry, configs, recipe_of
from checkpointing.cli.main import main
from tests.training import peers, runs
from tests.training.tiny_tokenizer import write_tokenizer

CONFIGS = [pytest.param(config, id=config.name) for config in configs()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_base(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistral")
    model = peers.hf_model(peers.config(family="mistral", vocab=307, sliding_window=9))
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize("config", CONFIGS)
def test_a_shipped_config_trains_one_step_and_saves(
    config: Entry, base: Path, mistral: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(config.name)
    assert recipe is not None
    model = mistral if config.name.startswith("mistral") else base
    overrides = [
        f"checkpointer.checkpoint_dir={model}",
        f"output_dir={tmp_path}/out",
        "max_steps_per_epoch=1",
        "epochs=1",
        "device=cpu",
    ]
    if "source" in OmegaConf.load(config.path).dataset:
        overrides.append(f"dataset.source={base}/rows.jsonl")
    assert main(["run", recipe.name, "--config", config.name, *overrides]) == 0
    saved = tmp_path / "out" / "epoch_0"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["step"], manifest["format"]) == (1, "hf")
    where = saved / "merged" if "_lora_" in config.name else saved
    assert (where / "model.safetensors.index.json").is_file()
