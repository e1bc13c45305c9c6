"""Which checkpoints of a run are kept, and what is never touched."""

import json
import shutil
from pathlib import Path

import pytest

from checkpointing import FullModelHFCheckpointer, Retention
from checkpointing.errors import ConfigError
from checkpointing.resume import SavedCheckpoint
from tests.tiny import write_hf
from tests.training import peers, runs
from tests.training.runs import checkpoints, metrics, run

LOSSES = {2: 0.9, 4: 0.5, 6: 0.7, 8: 0.5, 10: 0.8, 12: 0.6}


def saved(losses):
    """Checkpoints by their steps, with the losses in their manifests."""
    return [
        SavedCheckpoint(Path(f"step_{step}"), {"step": step, "metrics": {"loss": loss}})
        for step, loss in losses.items()
    ]


def kept(losses=LOSSES, **reasons):
    return sorted(int(path.name[5:]) for path in Retention(**reasons).kept(saved(losses)))


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ({"last": 1}, [12]),
        ({"last": 3}, [8, 10, 12]),
        ({"last": 77}, [2, 4, 6, 8, 10, 12]),
        ({"every_n_steps": 4}, [4, 8, 12]),
        ({"best": 1}, [8]),  # of the two with the same loss the newer one
        ({"best": 3}, [4, 8, 12]),
        ({"best": 2, "mode": "max"}, [2, 10]),
        ({"last": 1, "every_n_steps": 6}, [6, 12]),
        ({"last": 2, "every_n_steps": 5, "best": 1}, [8, 10, 12]),
    ],
    ids=str,
)
def test_a_checkpoint_is_kept_for_any_reason_that_is_given(reasons, expected):
    assert kept(**reasons) == expected


def test_one_that_does_not_tell_the_metric_is_kept_and_said_to_be(caplog):
    assert kept({2: 0.5, 4: None, 6: "0.1", 8: True, 10: float("nan"), 12: 0.4}, best=1) == [
        *(4, 6, 8, 10, 12)
    ]
    assert kept(best=1, metric="accuracy") == [2, 4, 6, 8, 10, 12]
    said = caplog.records[-1].getMessage()
    assert "does not tell 'accuracy'; save_checkpoint was given the metrics loss" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give last, every_n_steps or best, or leave retention out to keep all"),
        ({"last": 0}, "last=0: must be a whole number of at least 1, or null"),
        ({"best": 1.5, "every_n_steps": -3}, "every_n_steps=-3: .*; best=1.5: must be a whole"),
        ({"best": 2, "mode": "lowest"}, "mode=lowest: there are max, min"),
    ],
)
def test_a_policy_that_keeps_nothing_or_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Retention(**arguments)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_hf(peers.hf_model(peers.config(layers=1)), tmp_path_factory.mktemp("base") / "hf")


def save(checkpointer, state, *steps, loss=1.0):
    for step in steps:
        checkpointer.save_checkpoint(
            state, epoch=0, step=step, dir_prefix="step", metrics={"loss": loss, "lr": 0.1}
        )


def test_the_one_just_saved_stays_though_it_is_neither_due_nor_good(base, tmp_path):
    policy = Retention(every_n_steps=5, best=1)
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path, retention=policy)
    state = checkpointer.load_checkpoint()
    for step, loss in ((5, 3.0), (6, 1.0), (7, 2.0), (8, 4.0)):
        save(checkpointer, state, step, loss=loss)
        assert f"step_{step}" in checkpoints(tmp_path)
    assert checkpoints(tmp_path) == {"step_5", "step_6", "step_8"}


def test_what_the_run_did_not_write_is_never_touched(base, tmp_path):
    other = FullModelHFCheckpointer(base, output_dir=tmp_path)
    state = other.load_checkpoint()
    save(other, state, 1, 2)
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "notes.txt").write_text("mine")
    (tmp_path / "epoch_9").write_text("a file")
    mine = FullModelHFCheckpointer(base, output_dir=tmp_path, retention=Retention(last=1))
    save(mine, state, 11, 13)
    shutil.copytree(tmp_path / "step_13", tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    save(mine, state, 17)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step_1", "step_2", "step_3", "epoch_9", "damaged", "step_17")
    }


def test_a_checkpoint_that_is_still_to_be_read_stays(base, tmp_path):
    first = FullModelHFCheckpointer(base, output_dir=tmp_path, retention=Retention(last=1))
    state = first.load_checkpoint()
    save(first, {**state, "steps_run": 3}, 3)
    again = FullModelHFCheckpointer(
        base, output_dir=tmp_path, retention=Retention(last=1), should_load_recipe_state=True
    )
    save(again, state, 4)
    assert again.load_checkpoint()["steps_run"] == 3
    save(again, state, 5)
    assert checkpoints(tmp_path) == {"step_5"}


def test_who_goes_back_keeps_what_is_saved_then(base, tmp_path):
    first = FullModelHFCheckpointer(base, output_dir=tmp_path)
    state = first.load_checkpoint()
    save(first, state, 10, 20, 30)
    back = FullModelHFCheckpointer(
        base,
        output_dir=tmp_path,
        retention=Retention(last=2),
        should_load_recipe_state=str(tmp_path / "step_10"),
    )
    save(back, back.load_checkpoint(), 15)
    assert checkpoints(tmp_path) == {"step_15", "step_30"}


def test_arguments_that_contradict_each_other_or_are_no_policy_are_refused(base):
    both = {"keep_last_n_checkpoints": 3, "retention": Retention(best=2)}
    with pytest.raises(ConfigError, match=r"give one of them; .* retention\.last=3"):
        FullModelHFCheckpointer(base, **both)
    with pytest.raises(ConfigError, match=r"with _component_: checkpointing\.Retention"):
        FullModelHFCheckpointer(base, retention={"last": 2})


def test_a_recipe_keeps_the_best_by_the_loss_of_the_step_before_the_save(tmp_path):
    base, out = runs.write_base(tmp_path / "base"), tmp_path / "out"
    policy = "{_component_: checkpointing.Retention, last: 1, best: 2}"
    settings = ("save_every_n_steps=1", "save_adapter_weights_only=True", "optimizer.lr=0.03")
    run("lora", base, out, *settings, f"+checkpointer.retention={policy}")
    losses = {step: line["loss"] for step, line in metrics(out).items()}
    names = {4: "epoch_0", 8: "epoch_1"}
    best = sorted(losses, key=losses.get)[:2]
    assert checkpoints(out) == {names.get(step, f"step_{step}") for step in {*best, 8}}
    for step in best:
        manifest = out / names.get(step, f"step_{step}") / "manifest.json"
        assert json.loads(manifest.read_text())["metrics"]["loss"] == losses[step]


def test_a_metric_that_is_no_number_is_not_written(base, tmp_path):
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path)
    save(checkpointer, checkpointer.load_checkpoint(), 1, loss=float("inf"))
    manifest = (tmp_path / "step_1" / "manifest.json").read_text()
    assert json.loads(manifest)["metrics"] == {"lr": 0.1}
