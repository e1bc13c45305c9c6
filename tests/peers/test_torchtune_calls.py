"""Calls that are written for torchtune 0.6.1 and are answered here."""

import inspect

import pytest

import checkpointing
from tests.peers.models import HF, LLAMA3, META, TUNE, hf_base
from tests.peers.torchtune_process import TorchtuneError
from tests.tiny import assert_same_tensors

every_format = pytest.mark.parametrize("checkpointer", [HF, META, TUNE])


@pytest.mark.parametrize("method", ["__init__", "load_checkpoint", "save_checkpoint"])
@every_format
def test_every_argument_of_torchtune_has_its_name_place_and_default(
    checkpointer, method, torchtune
):
    own = inspect.signature(getattr(getattr(checkpointing, checkpointer), method)).parameters

    theirs = torchtune.signature(checkpointer, method)

    positional = [p for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for mine, (name, optional, default) in zip(positional, theirs, strict=False):
        assert mine.name == name
        if optional:
            assert repr(mine.default) == default, name
    assert len(positional) >= len(theirs)
    assert all(
        parameter.default is not parameter.empty
        for name, parameter in own.items()
        if name not in [each[0] for each in theirs]
    )


@pytest.mark.parametrize(
    "files",
    [
        {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"},
        ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"],
    ],
    ids=["a pattern", "in any order"],
)
def test_weight_files_are_named_as_for_torchtune(files, torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    arguments = base.arguments(tmp_path / "out", checkpoint_files=files)

    found = checkpointing.FullModelHFCheckpointer(**arguments).load_checkpoint()

    assert_same_tensors(found["model"], torchtune.load(HF, **arguments)["model"])


def test_a_member_of_torchtunes_model_types_is_taken_for_its_name(torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    arguments = base.arguments(tmp_path / "out")
    (base.directory / "config.json").write_text(
        '{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}'
    )
    expected = torchtune.load(HF, **arguments)["model"]

    found = torchtune.load_here(arguments.pop("model_type"), **arguments)

    assert_same_tensors(found["model"], expected)


@every_format
def test_what_torchtune_refuses_with_a_value_error_is_refused_with_one_here(
    checkpointer, torchtune, tmp_path
):
    base = hf_base(tmp_path / "base", LLAMA3)
    arguments = base.arguments(base.directory / "out", checkpoint_files=base.files[:1])

    with pytest.raises(TorchtuneError, match="ValueError: The output directory cannot be"):
        torchtune.load(checkpointer, **arguments)
    with pytest.raises(ValueError, match="lie in each other"):
        getattr(checkpointing, checkpointer)(**arguments)


def test_adapter_only_without_an_adapter_is_refused_as_by_torchtune(torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    arguments = base.arguments(tmp_path / "out")

    with pytest.raises(TorchtuneError, match="ValueError: Adapter checkpoint not found"):
        torchtune.save(HF, {"seed": 1}, arguments, adapter_only=True)
    with pytest.raises(ValueError, match="has no 'adapter'"):
        checkpointing.FullModelHFCheckpointer(**arguments).save_checkpoint(
            {"seed": 1}, epoch=0, adapter_only=True
        )
