from dataclasses import replace

import pytest
import torch

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.rope_scaling import Llama3RopeScaling
from checkpointing.training import TransformerDecoder, build_decoder
from tests.tiny import random_native
from tests.training import peers

SCALING = Llama3RopeScaling(8.0, 1.0, 4.0, 64)
MODELS = {
    "gqa, head_dim is not hidden/heads": peers.config(),
    "every head its own key": peers.config(kv_heads=6),
    "tied": peers.config(tied=True),
    "attention biases": peers.config(attention_bias=True),
    "all biases": peers.config(attention_bias=True, mlp_bias=True),
    "other theta and eps": peers.config(rope_theta=500000.0, norm_eps=1e-3),
    "llama 3 scaling": peers.config(rope_theta=1000.0, rope_scaling=SCALING),
    "mistral": peers.config(family="mistral"),
    "mistral, window": peers.config(family="mistral", sliding_window=5),
}


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS.keys())
def test_logits_are_those_of_transformers(cfg):
    peer = peers.hf_model(cfg)
    model = build_decoder(cfg, peers.native_weights(peer, cfg), torch.float32)
    tokens = peers.tokens()
    with torch.no_grad():
        # In fp64, so that the figure is the error and not the noise of random weights.
        expected = peer.double()(tokens).logits
        assert expected.std() > 0.1
        assert (model.double()(tokens) - expected).abs().max() < 1e-5


def test_a_model_with_features_that_the_decoder_lacks_is_not_built():
    cfg = replace(peers.config(), unsupported=("rope_type 'spiral'",))
    with pytest.raises(ConfigError, match="does not compute rope_type 'spiral'"):
        build_decoder(cfg, random_native(cfg), torch.float32)


def test_a_sliding_window_changes_the_logits():
    cfg = peers.config(family="mistral", sliding_window=5)
    weights = peers.native_weights(peers.hf_model(cfg), cfg)
    tokens = peers.tokens()
    with torch.no_grad():
        narrow = build_decoder(cfg, weights, torch.float32)(tokens)
        wide = build_decoder(peers.config(), weights, torch.float32)(tokens)
    assert torch.equal(narrow[:, 0], wide[:, 0])
    assert (narrow[:, 5:] - wide[:, 5:]).abs().amax((0, 2)).min() > 1e-3


@pytest.mark.parametrize("window", [None, 4])
def test_packed_documents_have_the_logits_of_separate_ones(window):
    cfg = peers.config(sliding_window=window)
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.float64)
    lengths = (9, 13, 6)
    tokens = peers.tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = model(tokens, input_pos=positions, document_ids=documents)
        separate = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert (packed - separate).abs().max() < 1e-5


def test_wanted_logits_are_those_of_the_full_output():
    cfg = peers.config()
    model = build_decoder(cfg, peers.native_weights(peers.hf_model(cfg), cfg), torch.float64)
    tokens = peers.tokens()
    wanted = tokens % 3 == 0
    with torch.no_grad():
        assert (model(tokens, wanted=wanted) - model(tokens)[wanted]).abs().max() < 1e-5


def test_the_rotary_angles_stay_fp32_in_a_bf16_model():
    cfg = peers.config(rope_theta=500000.0)
    weights = peers.native_weights(peers.hf_model(cfg), cfg)
    tokens = peers.tokens(1, 300)
    with torch.no_grad():
        wide = build_decoder(cfg, weights, torch.float32)(tokens)
        narrow = build_decoder(cfg, weights, torch.bfloat16)(tokens)
    assert narrow.dtype == torch.bfloat16
    # bf16 keeps 8 bits: positions above 256 would be off by whole tokens.
    assert (narrow - wide).norm() / wide.norm() < 0.05


def test_all_tensors_that_do_not_fit_are_in_one_error():
    cfg = peers.config()
    weights = peers.native_weights(peers.hf_model(cfg), cfg)
    del weights["layers.1.attn.q_proj.weight"]
    weights["layers.0.mlp.w1.weight"] = torch.zeros(56, 41)
    weights["layers.0.mlp.w4.weight"] = torch.zeros(2)
    with pytest.raises(TensorMismatchError) as caught:
        build_decoder(cfg, weights, torch.float32)
    assert caught.value.problems == (
        "layers.1.attn.q_proj.weight: missing",
        "layers.0.mlp.w4.weight: unexpected",
        "layers.0.mlp.w1.weight: shape [56, 41], expected [56, 42]",
    )


def test_a_tied_model_has_no_output_weight():
    names = TransformerDecoder(peers.config(tied=True)).state_dict().keys()
    assert "output.weight" not in names
    assert "output.weight" in TransformerDecoder(peers.config()).state_dict()


def test_a_built_model_owns_its_memory_unless_told_otherwise():
    cfg = peers.config()
    weights = peers.native_weights(peers.hf_model(cfg), cfg)
    own = build_decoder(cfg, weights, torch.float32)
    shared = build_decoder(cfg, weights, torch.float32, copy=False)
    for name, tensor in weights.items():
        assert own.state_dict()[name].data_ptr() != tensor.data_ptr()
        assert shared.state_dict()[name].data_ptr() == tensor.data_ptr()


def test_a_row_longer_than_the_context_is_refused():
    cfg = peers.config(max_seq_len=16)
    with pytest.raises(ConfigError, match=r"17 tokens .* 16; set tokenizer\.max_seq_len"):
        TransformerDecoder(cfg)(peers.tokens(1, 17))
