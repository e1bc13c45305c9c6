"""The shipped configs: valid, complete, and in agreement with the command."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from checkpointing.cli.catalog import Entry, configs, recipe_of
from checkpointing.cli.main import build_parser, main
from checkpointing.cli.recipe_file import load_recipe
from checkpointing.errors import ConfigError
from checkpointing.storage.cache import cache_dir

CONFIGS = [pytest.param(config, id=config.name) for config in configs()]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_shipped_config_is_valid(config: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", config.name]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS)
def test_a_shipped_config_sets_every_key_that_its_recipe_reads(config: Entry) -> None:
    owner = recipe_of(config.name)
    assert owner is not None
    keys = load_recipe(owner).config_keys
    assert keys is not None
    loaded = OmegaConf.load(config.path)
    own = {*loaded, *(f"model.{key}" for key in loaded.get("model", ()))}
    assert own == set(keys)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_header_says_how_to_get_the_model_and_how_to_run(config: Entry) -> None:
    header = [line for line in config.path.read_text().splitlines() if line.startswith("#")]
    owner = recipe_of(config.name)
    assert owner is not None
    assert any(line.startswith("#   tune download ") for line in header)
    (command,) = (line for line in header if line.endswith(f" {owner.name} --config {config.name}"))
    start = command.partition(owner.name)[0]
    many = owner.name.endswith("_distributed")
    assert (start == "#   tune run ") if not many else (" --nproc_per_node " in start)
    # What the line says is what the parser takes.
    build_parser().parse_args(command.removeprefix("#   tune ").split())


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "variables",
    [
        {"TUNEPOINT_CACHE": "/a/cache"},
        {"TUNEPOINT_CACHE": "/a/cache", "XDG_CACHE_HOME": "/b"},
        {"XDG_CACHE_HOME": "/b"},
        {"HOME": "/c"},
    ],
    ids=lambda variables: "+".join(variables),
)
def test_a_config_reads_the_model_where_the_download_command_in_its_header_puts_it(
    config: Entry, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TUNEPOINT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    (line,) = [
        line
        for line in config.path.read_text().splitlines()
        if line.startswith("#   tune download")
    ]
    repo = line.split()[3]
    name = "SmolLM2-135M-Instruct" if repo == "demo" else repo.partition("/")[2]
    loaded = OmegaConf.load(config.path)
    assert Path(loaded.checkpointer.checkpoint_dir) == cache_dir() / name
    assert loaded.tokenizer.path == loaded.checkpointer.checkpoint_dir


@pytest.mark.parametrize("variable", ["TUNEPOINT_CACHE", "XDG_CACHE_HOME"])
def test_an_empty_variable_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEPOINT_CACHE", raising=False)
    monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigError, match=variable):
        cache_dir()
