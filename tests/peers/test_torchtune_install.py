"""This project's wheel in one environment with torchtune 0.6.1."""

import json

from tests.peers.environment import run
from tests.training.runs import write_base

# Runs in torchtune's environment: the files of both distributions, and those whose hashes are not
# those that the distribution was installed with.
FILES = """
import base64, hashlib, json
from importlib.metadata import files

found = {}
for name in ("torchtune", "tunepoint"):
    changed = []
    for file in files(name):
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    found[name] = {"files": [str(file) for file in files(name)], "changed": changed}
print(json.dumps(found))
"""

IMPORTED = """
import json, sys
import checkpointing
from checkpointing import *
print(json.dumps([checkpointing.__file__, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def python(interpreter, directory, *arguments):
    """What the environment's python prints, away from this checkout."""
    return run(interpreter, *arguments, cwd=directory)


def test_both_are_imported_in_one_process(torchtune_python, tmp_path):
    program = (
        "import torchtune, checkpointing; print(torchtune.__file__); print(checkpointing.__file__)"
    )
    for path in python(torchtune_python, tmp_path, "-c", program).splitlines():
        assert path.startswith(str(torchtune_python.parents[1]))


def test_no_file_of_torchtune_but_the_script_tune_is_touched(torchtune_python, tmp_path):
    found = json.loads(python(torchtune_python, tmp_path, "-c", FILES))

    theirs, own = set(found["torchtune"]["files"]), set(found["tunepoint"]["files"])

    assert {path.rsplit("/", 1)[-1] for path in theirs & own} == {"tune"}
    changed = [path.rsplit("/", 1)[-1] for path in found["torchtune"]["changed"]]
    assert changed == ["tune"], f"changed in {torchtune_python.parents[1]}, which must be made anew"
    assert found["tunepoint"]["changed"] == []
    assert any(path.startswith("recipes/") for path in theirs)
    assert {path.split("/")[0] for path in own} <= {
        "..",
        "checkpointing",
        *(path.split("/")[0] for path in own if ".dist-info/" in path),
    }


def test_importing_checkpointing_imports_no_other_framework(torchtune_python, tmp_path):
    file, modules = json.loads(python(torchtune_python, tmp_path, "-c", IMPORTED))

    assert file.startswith(str(torchtune_python.parents[1]))
    assert "torch" in modules
    heavy = {"torchao", "torchtune", "transformers", "peft", "omegaconf", "datasets", "tokenizers"}
    assert not heavy & set(modules)


def test_the_command_line_is_there_beside_torchtunes(torchtune_python, tmp_path):
    listed = python(torchtune_python, tmp_path, "-m", "checkpointing", "ls")

    assert "lora_finetune_single_device" in listed
    assert "smollm2/135M_lora_single_device" in listed


def test_the_installed_wheel_lists_copies_and_runs(torchtune_python, tmp_path):
    # The wheel was installed last, so the script `tune` is its own.
    tune = torchtune_python.parent / "tune"
    base = write_base(tmp_path / "base")
    config = "smollm2/135M_lora_single_device"
    assert config in run(tune, "ls", cwd=tmp_path)
    run(tune, "cp", config, "mine.yaml", cwd=tmp_path)
    run(tune, "cp", "lora_finetune_single_device", "mine.py", cwd=tmp_path)
    own = (f"checkpointer.checkpoint_dir={base}", "output_dir=out", "max_steps_per_epoch=2")
    for recipe in ("lora_finetune_single_device", "mine.py"):
        printed = run(tune, "run", recipe, "--config", "mine.yaml", *own, cwd=tmp_path)
        assert "Checkpoint: out/epoch_0" in printed
    assert (tmp_path / "out" / "epoch_0" / "merged" / "config.json").is_file()


def test_the_requirements_of_both_agree(torchtune_python, tmp_path):
    assert "No broken requirements" in python(torchtune_python, tmp_path, "-m", "pip", "check")
