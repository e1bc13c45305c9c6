"""A manifest or a recipe state that is not what a run saved."""

import json

from tests.hostile import samples
from tests.hostile.harness import cases, fuzz, survives
from tests.hostile.mutations import json_files, torch_files


@cases(40, 500)
def test_a_manifest_is_read_or_refused_with_its_name(tmp_path, count):
    base = samples.write_hf_model(tmp_path / "model")
    directory = samples.write_run(base, tmp_path / "out")
    (tmp_path / "secret.json").write_text("{}")
    file = directory / "manifest.json"
    readers = samples.resuming_readers(base, tmp_path / "out")
    readers += samples.adapter_readers(base, directory)

    def check(content):
        file.write_bytes(content)
        for read in readers:
            survives(read, tmp_path)

    fuzz(count, json_files(json.loads(file.read_text()), ("step", "saved_at_ns", "base")), check)


@cases(60, 1000)
def test_a_recipe_state_is_read_or_refused_with_its_name(tmp_path, count):
    base = samples.write_hf_model(tmp_path / "model")
    directory = samples.write_run(base, tmp_path / "out")
    file = directory / "recipe_state.pt"
    # As torchtune leaves it: a manifest would tell from the size alone that it has changed.
    (directory / "manifest.json").unlink()
    read = samples.reader_of_named_state(base, file)
    state = read()
    assert state["names"] == samples.RECIPE_STATE["names"]

    def check(content):
        file.write_bytes(content)
        survives(read, tmp_path)

    fuzz(count, torch_files(file.read_bytes()), check)
