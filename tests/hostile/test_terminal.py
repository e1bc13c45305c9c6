"""What a file says never reaches a terminal as anything but visible characters."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpointing.cli.main import main
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.printable import printable
from tests.hostile import samples

_NASTY = "\x1b[2J\x1b]0;gone\x07two\nlines\r\x9b31m\u202egnp\u2028"


def _is_visible(text):
    return all(line.isprintable() for line in text.split("\n"))


def test_an_escape_is_that_of_python():
    assert printable("a\x1b[31m\n\u202e\udc80é") == r"a\x1b[31m" + r"\n\u202e\udc80é"


def test_a_message_keeps_its_own_lines_only():
    error = TensorMismatchError("x\ny", ["a\nb: missing", "c: \x1b[2J"], "Do this.")
    assert str(error).split("\n") == [
        r"x\ny: 2 problems",
        r"  - a\nb: missing",
        r"  - c: \x1b[2J",
        "Do this.",
    ]
    assert str(ConfigError("a\x1b[2J\nb")) == "a\\x1b[2J\nb"


def test_problems_alike_in_many_numbers_are_folded_at_once():
    names = [f"x.{'.'.join(digit * 60)}.y" for digit in "01"]
    text = str(TensorMismatchError("model", [f"{name}: missing" for name in names], "Do this."))
    assert all(name in text for name in names)


@pytest.fixture
def model(tmp_path):
    directory = samples.write_hf_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, _NASTY: torch.ones(2)}, directory / "model.safetensors")
    return directory


def test_commands_print_names_of_tensors_as_visible_characters(tmp_path, model, capsys):
    other = samples.write_hf_model(tmp_path / "other")
    capsys.readouterr()
    main(["inspect", str(model)])
    main(["convert", str(model), str(tmp_path / "out"), "--to", "tune"])
    main(["diff", str(model), str(other)])
    printed = capsys.readouterr()
    assert r"\x1b[2J\x1b]0;gone" in printed.out + printed.err
    # A progress bar goes back to the start of its line.
    assert _is_visible(printed.out) and _is_visible(printed.err.replace("\r", ""))


def test_inspect_prints_configs_and_manifests_as_visible_characters(tmp_path, capsys):
    base = samples.write_hf_model(tmp_path / "model")
    directory = samples.write_run(base, tmp_path / "out")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["base"]["directory"] = manifest["converted_from"] = _NASTY
    manifest["adapter_config"]["target_modules"] = [_NASTY]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main(["inspect", str(directory)]) == 0
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "model_type": _NASTY}))
    main(["inspect", str(base)])
    printed = capsys.readouterr()
    assert printed.out.count(r"\x1b]0;gone") >= 2
    # A progress bar goes back to the start of its line.
    assert _is_visible(printed.out) and _is_visible(printed.err.replace("\r", ""))
