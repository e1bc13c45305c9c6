"""Runs that were begun with torchtune 0.6.1 and go on here."""

import pytest
import torch

import checkpointing
from tests.peers.models import HF, LLAMA3, META, TUNE, base_for, hf_base, ours
from tests.peers.states import adapter_state, recipe_state
from tests.tiny import ATTENTION, assert_same_tensors, random_native

every_format = pytest.mark.parametrize("checkpointer", [HF, META, TUNE])


def assert_same(found, expected):
    """The same values all through dictionaries and lists; tensors bit for bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert_same_tensors({"": found}, {"": expected})
    else:
        assert found == expected


@every_format
def test_an_adapter_run_of_torchtune_goes_on_here_from_its_named_files(
    checkpointer, torchtune, tmp_path
):
    base = base_for(checkpointer, tmp_path / "base", LLAMA3, torchtune)
    state = adapter_state(torchtune, checkpointer, base, ATTENTION)
    kept = recipe_state(state["adapter"])
    out = tmp_path / "out"
    torchtune.save(
        checkpointer, {**state, **kept}, base.arguments(out), intermediate_checkpoint=True
    )
    weights = torchtune.load(checkpointer, **base.arguments(tmp_path / "unused"))["model"]

    resumed = ours(
        checkpointer,
        **base.arguments(
            out,
            should_load_recipe_state=True,
            adapter_checkpoint="epoch_0/adapter_model.pt",
            recipe_checkpoint="recipe_state/recipe_state.pt",
        ),
    )
    found = resumed.load_checkpoint()

    # The base, not the merged weights that lie beside the adapter.
    assert_same_tensors(found.pop("model"), weights)
    assert_same_tensors(found.pop("adapter"), state["adapter"])
    assert_same(found, kept)
    saved = resumed.save_checkpoint({**state, **kept}, epoch=1, intermediate_checkpoint=True)
    assert saved == out / "epoch_1"


def test_a_full_run_of_torchtune_goes_on_here_in_another_output_dir(torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    native = random_native(LLAMA3.config)
    kept = recipe_state(native)
    out = tmp_path / "out"
    torchtune.save(HF, {"model": native, **kept}, base.arguments(out), intermediate_checkpoint=True)

    found = checkpointing.FullModelHFCheckpointer(
        checkpoint_dir=out / "epoch_0",
        output_dir=tmp_path / "next",
        should_load_recipe_state=True,
        recipe_checkpoint=out / "recipe_state" / "recipe_state.pt",
    ).load_checkpoint()

    assert_same_tensors(found.pop("model"), native)
    assert_same(found, kept)


def test_a_full_run_of_torchtune_goes_on_here_from_the_files_named_in_its_output_dir(
    torchtune, tmp_path
):
    base = hf_base(tmp_path / "base", LLAMA3)
    native = random_native(LLAMA3.config)
    kept = recipe_state(native)
    out = tmp_path / "out"
    torchtune.save(HF, {"model": native, **kept}, base.arguments(out), intermediate_checkpoint=True)
    arguments = base.arguments(
        out,
        checkpoint_files=[f"epoch_0/{name}" for name in base.files],
        should_load_recipe_state=True,
        recipe_checkpoint="recipe_state/recipe_state.pt",
    )
    assert_same_tensors(torchtune.load(HF, **arguments)["model"], native)

    found = checkpointing.FullModelHFCheckpointer(**arguments).load_checkpoint()

    assert_same_tensors(found.pop("model"), native)
    assert_same(found, kept)
