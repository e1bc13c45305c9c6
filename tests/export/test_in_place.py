"""Merging in place, and switching the adapter off: the model comes back as it was."""

import pytest
import torch

from checkpointing import FullModelHFCheckpointer
from checkpointing.errors import ConfigError
from checkpointing.export import merged, merged_stream
from checkpointing.training import base_state_dict, build_decoder
from checkpointing.training.adapter_switch import adapter_off
from tests.export.live import KINDS, live_model, nf4_model, shake, snapshot
from tests.families.variants import VARIANTS, tokens

FAMILIES = ("llama", "qwen2", "gemma2", "mixtral", "qwen3_moe, some layers dense")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_the_merged_model_computes_the_same_and_is_undone_exactly(tmp_path, variant, kind):
    model = live_model(tmp_path, variant, KINDS[kind]).double()
    parameters, before = dict(model.named_parameters()), snapshot(model)
    with torch.no_grad():
        expected = model(tokens())
        with merged(model) as same:
            assert same is model
            assert (model(tokens()) - expected).abs().max() < 1e-9
            inside = dict(model.named_parameters())
            assert any(inside[name] is not parameter for name, parameter in parameters.items())
        assert torch.equal(model(tokens()), expected)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert snapshot(model) == before


def test_the_adapter_is_not_computed_in_the_block(tmp_path):
    model = live_model(tmp_path)
    with torch.no_grad():
        expected = model(tokens())
        with merged(model):
            shake(model, 9)
            assert (model(tokens()) - expected).abs().max() < 1e-4
        assert (model(tokens()) - expected).abs().max() > 0.01


def test_a_model_in_nf4_is_merged_and_is_in_nf4_again(tmp_path):
    model = nf4_model(tmp_path, ("q_proj", "w2"))
    weight = model.layers[1].mlp.w2.weight
    with torch.no_grad():
        expected = model(tokens())
        with merged(model):
            assert (model(tokens()) - expected).abs().max() < 1e-4
        assert torch.equal(model(tokens()), expected)
    assert model.layers[1].mlp.w2.weight is weight


@pytest.mark.parametrize("round", range(2))
def test_an_error_in_the_block_undoes_it_too(tmp_path, round):
    model = live_model(tmp_path)
    before = snapshot(model)
    for _ in range(round + 1):
        with pytest.raises(KeyError), merged(model):
            raise KeyError
        assert snapshot(model) == before
        with torch.no_grad(), adapter_off(model):
            base = model(tokens())
        with torch.no_grad():
            assert (model(tokens()) - base).abs().max() > 0.01


def test_what_is_merged_is_not_merged_again(tmp_path):
    model = live_model(tmp_path)
    before = snapshot(model)
    with merged(model):
        with pytest.raises(ConfigError, match="merged already"), merged(model):
            pass
        for act in (merged_stream, base_state_dict):
            with pytest.raises(ConfigError, match="merged in place"):
                act(model)
    with adapter_off(model), pytest.raises(ConfigError, match="switched off"), merged(model):
        pass
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "classifier" not in v])
def test_with_its_adapter_off_a_model_is_its_base(tmp_path, variant, kind):
    model = live_model(tmp_path, variant, KINDS[kind])
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    base = build_decoder(checkpointer.model_config, weights, torch.float32).eval()
    with torch.no_grad():
        adapted = model(tokens())
        with adapter_off(model):
            assert torch.equal(model(tokens()), base(tokens()))
        assert torch.equal(model(tokens()), adapted)
        assert (adapted - base(tokens())).abs().max() > 0.01
