"""Adapters that travel between torchtune 0.6.1 and this project."""

import json

import pytest
import torch
from safetensors.torch import load_file

import checkpointing
from checkpointing import AdapterConfig, MergedStateDict
from tests.peers.models import HF, LLAMA3, META, TUNE, WIDE_HEADS, base_for, hf_base, ours
from tests.peers.states import ALPHA, RANK, adapter_state
from tests.tiny import ATTENTION, MLP, assert_same_tensors

QKV = ("q_proj", "k_proj", "v_proj")
EVERYTHING = (*ATTENTION, *MLP, "output")
every_format = pytest.mark.parametrize("checkpointer", [HF, META, TUNE])
wide_or_not = pytest.mark.parametrize("model", [LLAMA3, WIDE_HEADS], ids=["plain", "wide heads"])


def saved_by_both(torchtune, base, state, tmp_path):
    """The directories of the same checkpoint, as torchtune and as this project save it."""
    torchtune.save(HF, state, base.arguments(tmp_path / "theirs"), intermediate_checkpoint=True)
    own = checkpointing.FullModelHFCheckpointer(**base.arguments(tmp_path / "ours"))
    return tmp_path / "theirs" / "epoch_0", own.save_checkpoint(state, epoch=0)


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
@every_format
def test_an_adapter_that_torchtune_writes_loads_here(checkpointer, use_dora, torchtune, tmp_path):
    base = base_for(checkpointer, tmp_path / "base", WIDE_HEADS, torchtune)
    state = adapter_state(torchtune, checkpointer, base, EVERYTHING, use_dora)
    torchtune.save(checkpointer, state, base.arguments(tmp_path / "theirs"))
    file = tmp_path / "theirs" / "epoch_0" / "adapter_model.pt"

    found = ours(
        checkpointer, **base.arguments(tmp_path / "out", adapter_checkpoint=file)
    ).load_checkpoint()

    assert_same_tensors(found["adapter"], state["adapter"])
    weights = torchtune.load(checkpointer, **base.arguments(tmp_path / "unused"))["model"]
    assert_same_tensors(found["model"], weights)


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
@every_format
def test_torchtune_resumes_an_adapter_that_is_written_here(
    checkpointer, use_dora, torchtune, tmp_path
):
    base = base_for(checkpointer, tmp_path / "base", WIDE_HEADS, torchtune)
    state = adapter_state(torchtune, checkpointer, base, EVERYTHING, use_dora)
    ours(checkpointer, **base.arguments(tmp_path / "out")).save_checkpoint(state, epoch=0)

    found = torchtune.load(
        checkpointer,
        **base.arguments(
            tmp_path / "out",
            should_load_recipe_state=True,
            adapter_checkpoint="epoch_0/adapter_model.pt",
            recipe_checkpoint="epoch_0/recipe_state.pt",
        ),
    )

    assert_same_tensors(found["adapter"], state["adapter"])
    assert (found["epochs_run"], found["seed"]) == (1, 17)


@pytest.mark.parametrize("targets", [QKV, (*ATTENTION, *MLP), EVERYTHING], ids=len)
@wide_or_not
def test_lora_in_the_form_of_peft_is_the_same_as_torchtunes(model, targets, torchtune, tmp_path):
    base = hf_base(tmp_path / "base", model)
    state = adapter_state(torchtune, HF, base, targets)

    theirs, own = saved_by_both(torchtune, base, state, tmp_path)

    name = "adapter_model.safetensors"
    assert_same_tensors(load_file(own / name), load_file(theirs / name))
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (own, theirs)]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0].items() >= configs[1].items()


def test_the_merged_model_is_the_same_as_torchtunes(torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    state = adapter_state(torchtune, HF, base, EVERYTHING)

    theirs, own = saved_by_both(torchtune, base, state, tmp_path)

    found, expected = (
        {
            name: tensor
            for path in directory.glob("model-*.safetensors")
            for name, tensor in load_file(path).items()
        }
        for directory in (own / "merged", theirs)
    )
    assert_same_tensors(found, expected)


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_merging_gives_torchtunes_weights_up_to_rounding(use_dora, torchtune, tmp_path):
    base = hf_base(tmp_path / "base", WIDE_HEADS)
    state = adapter_state(torchtune, HF, base, EVERYTHING, use_dora)
    weights = checkpointing.FullModelHFCheckpointer(base.directory).load_checkpoint()["model"]
    config = AdapterConfig(RANK, ALPHA, EVERYTHING, use_dora=use_dora)

    merged = dict(MergedStateDict(weights, state["adapter"], config))

    torch.testing.assert_close(merged, state["model"], rtol=1e-5, atol=1e-5)


def test_dora_is_not_named_in_torchtunes_config_and_is_in_ours(torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    state = adapter_state(torchtune, HF, base, ATTENTION, use_dora=True)

    theirs, own = saved_by_both(torchtune, base, state, tmp_path)

    assert "use_dora" not in json.loads((theirs / "adapter_config.json").read_text())
    assert json.loads((own / "adapter_config.json").read_text())["use_dora"] is True


@wide_or_not
def test_dora_magnitudes_differ_from_torchtunes_by_the_rope_order_of_q_and_k_alone(
    model, torchtune, tmp_path
):
    base = hf_base(tmp_path / "base", model)
    state = adapter_state(torchtune, HF, base, EVERYTHING, use_dora=True)
    name = "adapter_model.safetensors"

    theirs, own = (
        load_file(path / name) for path in saved_by_both(torchtune, base, state, tmp_path)
    )

    expected = dict(theirs)
    half = model.dims.head_dim // 2
    for module, heads in (("q_proj", model.dims.heads), ("k_proj", model.dims.kv_heads)):
        for layer in range(model.dims.layers):
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_magnitude_vector"
            assert torch.equal(
                theirs[key], state["adapter"][f"layers.{layer}.attn.{module}.magnitude"]
            )
            # Row i + half * j of a head is the native row 2 i + j.
            rows = [
                head * 2 * half + 2 * i + j
                for head in range(heads)
                for j in (0, 1)
                for i in range(half)
            ]
            expected[key] = theirs[key][rows]
            assert not torch.equal(expected[key], theirs[key])
    assert_same_tensors(own, expected)


def test_peft_finds_the_base_and_the_task_in_our_config_and_not_in_torchtunes(torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    state = adapter_state(torchtune, HF, base, ATTENTION)

    theirs, own = (
        json.loads((path / "adapter_config.json").read_text())
        for path in saved_by_both(torchtune, base, state, tmp_path)
    )

    assert not {"task_type", "base_model_name_or_path"} & set(theirs)
    assert own["task_type"] == "CAUSAL_LM"
    assert own["base_model_name_or_path"] == str(base.directory.resolve())


def test_the_repository_that_the_base_came_from_is_named_as_torchtune_names_it(torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    (base.directory / "original_repo_id.json").write_text('{"repo_id": "someone/some-model"}')
    state = adapter_state(torchtune, HF, base, ATTENTION)

    for path in saved_by_both(torchtune, base, state, tmp_path):
        config = json.loads((path / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "someone/some-model"


@every_format
def test_adapter_only_writes_no_weights_of_the_model(checkpointer, torchtune, tmp_path):
    base = base_for(checkpointer, tmp_path / "base", LLAMA3, torchtune)
    state = adapter_state(torchtune, checkpointer, base, ATTENTION)
    del state["model"]
    torchtune.save(checkpointer, state, base.arguments(tmp_path / "theirs"), adapter_only=True)

    own = ours(checkpointer, **base.arguments(tmp_path / "ours")).save_checkpoint(
        state, epoch=0, adapter_only=True
    )

    written = [
        {path.name for path in directory.rglob("*") if "model" in path.name}
        for directory in (own, tmp_path / "theirs" / "epoch_0")
    ]
    assert written[0] == written[1]
    adapter = torch.load(own / "adapter_model.pt", weights_only=True)
    assert_same_tensors(adapter, state["adapter"])
