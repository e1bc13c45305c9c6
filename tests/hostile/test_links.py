"""A link in a checkpoint leads nowhere else, unless it is one of the Hub's cache."""

import shutil

import pytest

from checkpointing import FullModelHFCheckpointer
from checkpointing.convert import plan_conversion, write_model
from checkpointing.errors import UnsafePathError
from tests.hostile import samples


def _moved_out(directory, name, to):
    """Puts a file elsewhere, and a link to it in its place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(directory / name, to)
    (directory / name).symlink_to(to)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_directory_is_not_followed(tmp_path, name):
    directory = samples.write_hf_model(tmp_path / "model")
    _moved_out(directory, name, tmp_path / "elsewhere" / name)
    with pytest.raises(UnsafePathError, match=rf"{name}: is a link to .*elsewhere"):
        FullModelHFCheckpointer(directory).load_checkpoint()


def test_a_linked_recipe_state_and_manifest_are_not_used(tmp_path):
    base = samples.write_hf_model(tmp_path / "model")
    directory = samples.write_run(base, tmp_path / "out")
    _moved_out(directory, "manifest.json", tmp_path / "elsewhere" / "manifest.json")
    for resume in samples.resuming_readers(base, tmp_path / "out")[1:]:
        with pytest.raises(UnsafePathError, match="is a link"):
            resume()
    (directory / "manifest.json").unlink()
    _moved_out(directory, "recipe_state.pt", tmp_path / "elsewhere" / "recipe_state.pt")
    with pytest.raises(UnsafePathError, match="is a link"):
        samples.reader_of_named_state(base, directory / "recipe_state.pt")()


def test_links_within_the_directory_and_to_it_are_followed(tmp_path):
    directory = samples.write_hf_model(tmp_path / "model")
    _moved_out(directory, "model.safetensors", directory / "files" / "model.safetensors")
    (tmp_path / "link").symlink_to(directory)
    assert FullModelHFCheckpointer(tmp_path / "link").load_checkpoint()["model"]


def test_the_hubs_cache_is_read(tmp_path):
    directory = samples.write_hf_model(tmp_path / "models--a--b" / "snapshots" / "1f2e")
    blobs = tmp_path / "models--a--b" / "blobs"
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        _moved_out(directory, name, blobs / f"hash-of-{name}")
    assert FullModelHFCheckpointer(directory).load_checkpoint()["model"]
    write_model(plan_conversion(directory, "hf"), tmp_path / "converted")
    assert (tmp_path / "converted" / "generation_config.json").is_file()


def test_what_a_link_leads_to_is_not_copied_beside_the_weights(tmp_path, caplog):
    directory = samples.write_hf_model(tmp_path / "model")
    (tmp_path / "private").write_text("secret")
    (directory / "notes.txt").symlink_to(tmp_path / "private")
    (directory / "own.txt").write_text("licence")
    write_model(plan_conversion(directory, "hf"), tmp_path / "converted")
    assert not (tmp_path / "converted" / "notes.txt").exists()
    assert (tmp_path / "converted" / "own.txt").read_text() == "licence"
    assert "not copied" in caplog.text and "notes.txt" in caplog.text
