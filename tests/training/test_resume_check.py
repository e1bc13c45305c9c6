"""A resumed run says what has changed, and is refused if it has become another one."""

import json
import os

import pytest
import torch

from checkpointing.cli.main import main
from checkpointing.errors import ConfigError
from checkpointing.resume import load_recipe_state
from checkpointing.training import run_record
from tests.training import runs
from tests.training.runs import metrics, recipe_config, run, run_until, same, weights

SAVING = "save_every_n_steps=3"
RESUME = "resume_from_checkpoint=True"
ANYHOW = (RESUME, "resume_override=True")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def finished(base, tmp_path):
    """A run of one epoch."""
    run("lora", base, tmp_path, "epochs=1", "~lr_scheduler")
    return tmp_path


def changes(shown):
    """The lines about what has changed."""
    return shown.partition("changed since the checkpoint was saved:\n")[2].splitlines()


def test_what_changes_is_shown_and_so_is_what_it_means(base, finished, capsys):
    capsys.readouterr()
    run(
        "lora",
        base,
        finished,
        "~lr_scheduler",
        RESUME,
        "optimizer.lr=0.00125",
        "model.lora_dropout=0.1",
        "clip_grad_norm=null",
        "gradient_accumulation_steps=3",
        "log_every_n_steps=7",
        f"metric_logger.log_dir={finished}/more",
    )
    assert set(changes(capsys.readouterr().out)[:7]) == {
        "  epochs: 1 -> 2",
        "  optimizer.lr: 0.003 -> 0.00125 (from here on)",
        "  model.lora_dropout: 0.3 -> 0.1 (from here on)",
        "  clip_grad_norm: 1.0 -> null (from here on)",
        "  gradient_accumulation_steps: 2 -> 3 (from here on)",
        "  log_every_n_steps: null -> 7",
        f"  metric_logger.log_dir: {finished}/logs -> {finished}/more",
    }


def test_a_run_that_goes_on_as_it_was_says_nothing(base, finished, capsys):
    capsys.readouterr()
    run("lora", base, finished, "epochs=1", "~lr_scheduler", RESUME)
    assert "changed since" not in capsys.readouterr().out


def test_all_that_makes_it_another_run_is_listed_and_refused(base, finished):
    before = sorted(finished.iterdir())
    with pytest.raises(ConfigError) as caught:
        run(
            "lora",
            base,
            finished,
            RESUME,
            "optimizer=torch.optim.SGD",
            "model.lora_rank=4",
            "dtype=bf16",
            "batch_size=3",
            "shuffle=False",
            "seed=77",
            "epochs=5",
        )
    lines = str(caught.value).splitlines()
    assert set(lines[1:-1]) == {
        "  - optimizer._component_: torch.optim.AdamW -> torch.optim.SGD",
        "  - model.lora_rank: 3 -> 4",
        "  - dtype: null -> bf16",
        "  - batch_size: 2 -> 3",
        "  - shuffle: True -> False",
        "  - seed: 5 -> 77",
    }
    assert "resume_override=True" in lines[-1]
    assert sorted(finished.iterdir()) == before


def test_another_run_is_let_pass_if_it_is_wanted(base, finished, capsys):
    run("lora", base, finished, "~lr_scheduler", *ANYHOW, "batch_size=3", "seed=77")
    assert "  seed: 5 -> 77 (makes it another run)" in changes(capsys.readouterr().out)
    # 13 rows: 4 steps of 2 * 2, then 3 steps of 2 * 3.
    assert sorted(metrics(finished)) == [1, 2, 3, 4, 5, 6, 7]
    state = load_recipe_state(finished / "epoch_1/recipe_state.pt")
    assert (state["seed"], state["dataloader"]["batch_size"]) == (77, 3)


def test_within_an_epoch_another_run_begins_the_epoch_anew(base, tmp_path, capsys):
    run_until(7, "full", base, tmp_path, SAVING)
    changed = "gradient_accumulation_steps=3"
    message = "gradient_accumulation_steps within an epoch: 2 -> 3"
    with pytest.raises(ConfigError, match=message):
        run("full", base, tmp_path, RESUME, changed)
    run("full", base, tmp_path, *ANYHOW, changed)
    assert "epoch 1 is begun anew" in capsys.readouterr().out
    # 6 steps were saved; 7 batches in steps of 3 are 3 more.
    assert load_recipe_state(tmp_path / "epoch_1/recipe_state.pt")["steps_run"] == 9


def test_between_epochs_another_accumulation_is_none_of_another_run(base, finished):
    run("lora", base, finished, "~lr_scheduler", RESUME, "gradient_accumulation_steps=3")
    assert sorted(metrics(finished)) == [1, 2, 3, 4, 5, 6, 7]


def test_the_rows_tell_whether_the_data_is_the_same_and_not_their_file(base, finished, capsys):
    copy = finished / "copy.jsonl"
    copy.write_bytes((base / "rows.jsonl").read_bytes())
    arguments = ("~lr_scheduler", RESUME, f"dataset.source={copy}")
    run("lora", base, finished, "epochs=2", *arguments)
    line = f"  dataset.source: {base}/rows.jsonl -> {copy}"
    assert line in changes(capsys.readouterr().out)
    copy.write_text('{"instruction": "x", "output": "y"}\n' * 13)
    with pytest.raises(ConfigError, match=r"dataset or tokenizer \(checksum of the rows\): \d+"):
        run("lora", base, finished, "epochs=3", *arguments)


def test_a_base_may_move_but_of_a_full_run_only_if_it_is_wanted(base, tmp_path):
    moved = runs.write_base(tmp_path / "moved")
    link = tmp_path / "link"
    os.symlink(base, link)
    for kind in ("lora", "full"):
        run(kind, base, tmp_path / kind, "epochs=1")
    at_moved = f"checkpointer.checkpoint_dir={moved}"
    at_link = f"checkpointer.checkpoint_dir={link}"
    run("full", base, tmp_path / "full", "epochs=2", RESUME, at_link)
    with pytest.raises(ConfigError, match=f"checkpoint_dir: {link} -> {moved}"):
        run("full", base, tmp_path / "full", "epochs=3", RESUME, at_moved)
    # The fingerprint of an adapter's base has told that it is the same.
    run("lora", base, tmp_path / "lora", "epochs=2", RESUME, at_moved)


def test_another_number_of_processes_is_shown_and_goes_on(base, finished, tmp_path, capsys):
    path = finished / "epoch_0/recipe_state.pt"
    state = load_recipe_state(path)
    state["run"]["world_size"] = 2
    torch.save(state, finished / "other.pt")
    run(
        "lora",
        base,
        tmp_path,
        "epochs=2",
        RESUME,
        f"+checkpointer.recipe_checkpoint={finished}/other.pt",
        f"+checkpointer.adapter_checkpoint={finished}/epoch_0/adapter_model.pt",
    )
    assert "world_size: 2 -> 1 (from here on)" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_say_what_the_run_was_is_resumed(base, finished, capsys):
    state = load_recipe_state(finished / "epoch_0/recipe_state.pt")
    del state["run"], state["lr_scheduler"]
    torch.save(state, finished / "other.pt")
    run(
        "lora",
        base,
        finished,
        "optimizer.lr=0.002",
        "~lr_scheduler",
        RESUME,
        f"+checkpointer.recipe_checkpoint={finished}/other.pt",
        f"+checkpointer.adapter_checkpoint={finished}/epoch_0/adapter_model.pt",
    )
    assert "changed since" not in capsys.readouterr().out
    assert metrics(finished)[5]["lr"] == 0.002


def test_the_names_of_recipe_and_config_are_in_the_manifest_and_no_directory(base, tmp_path):
    recipe_config("lora", base, tmp_path)
    config = tmp_path / "recipe.yaml"
    command = ["run", "lora_finetune_single_device", "--config", str(config)]
    assert main([*command, "epochs=1", "max_steps_per_epoch=1"]) == 0
    manifest = json.loads((tmp_path / "epoch_0/manifest.json").read_text())
    assert (manifest["recipe"], manifest["config"]) == ("lora_finetune_single_device", "recipe")


def test_what_is_kept_of_a_config_is_resolved_and_without_passwords(base, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hf_1234")
    overrides = ("+dataset.hf_token=${oc.env:MY_TOKEN}", "+metric_logger.api_key=k", RESUME)
    record = run_record(recipe_config("lora", base, tmp_path, *overrides))
    settings = record["settings"]
    assert settings["checkpointer"]["output_dir"] == str(tmp_path)
    assert "resume_from_checkpoint" not in settings
    assert "hf_1234" not in str(record)
    assert "api_key" not in settings["metric_logger"]


def test_a_schedule_is_that_of_the_new_settings_from_here_on(base, tmp_path):
    longer = ("lr_scheduler.num_warmup_steps=3", "optimizer.lr=0.004")
    run("lora", base, tmp_path / "whole", "epochs=2", *longer)
    run("lora", base, tmp_path / "changed", "epochs=1")
    run("lora", base, tmp_path / "changed", "epochs=2", RESUME, *longer)
    whole, changed = metrics(tmp_path / "whole"), metrics(tmp_path / "changed")
    assert [changed[n]["lr"] for n in (5, 6, 7, 8)] == [whole[n]["lr"] for n in (5, 6, 7, 8)]
    found = weights(tmp_path / "changed/epoch_1")
    assert not same(found, weights(tmp_path / "whole/epoch_1"))


def test_a_full_run_can_go_on_in_another_dtype_if_it_is_wanted(base, tmp_path):
    run("full", base, tmp_path, "epochs=1")
    run("full", base, tmp_path, *ANYHOW, "epochs=2", "dtype=bf16")
    assert {tensor.dtype for tensor in weights(tmp_path / "epoch_1").values()} == {torch.bfloat16}
