"""Recipes that save in the background: the same run, the same checkpoints."""

import json

import pytest

from checkpointing.verify import verify
from tests.training import runs


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_it_is_the_run_that_saves_in_the_foreground(tmp_path, kind):
    base = runs.write_base(tmp_path / "base")
    plain, background = tmp_path / "plain", tmp_path / "background"
    runs.run(kind, base, plain, "save_every_n_steps=1")
    options = ("save_every_n_steps=1", "enable_async_checkpointing=true")
    runs.run(kind, base, background, *options)
    assert runs.metrics(background) == runs.metrics(plain)
    assert runs.checkpoints(background) == runs.checkpoints(plain) != set()
    for name in runs.checkpoints(plain):
        assert not verify(background / name).problems
        found, expected = (
            json.loads((out / name / "manifest.json").read_text())["files"]
            for out in (background, plain)
        )
        different = [file for file in expected if found[file] != expected[file]]
        # The recipe state names the run's settings, which differ in one.
        assert set(different) <= {"recipe_state.pt"} and found.keys() == expected.keys()
    lines = map(json.loads, (background / "logs/metrics.jsonl").read_text().splitlines())
    times = [line for line in lines if "save_blocked_seconds" in line]
    assert times and all(line["save_written_seconds"] > 0 for line in times)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_it_resumes_as_if_it_had_not_been_stopped(tmp_path, kind):
    base = runs.write_base(tmp_path / "base")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = ("save_every_n_steps=2", "enable_async_checkpointing=true")
    runs.run(kind, base, whole, *options)
    runs.run_until(3, kind, base, stopped, *options)
    runs.run(kind, base, stopped, *options, "resume_from_checkpoint=true")
    assert runs.metrics(stopped) == runs.metrics(whole)
    assert runs.same(runs.weights(stopped / "epoch_0"), runs.weights(whole / "epoch_0"))
