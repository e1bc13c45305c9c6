"""Frequencies and attention factors of every scaling, against transformers and by hand."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from checkpointing import FullModelHFCheckpointer
from checkpointing.formats.hf_rope import rope_scaling_field
from checkpointing.mapping.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)
from checkpointing.training import build_decoder
from checkpointing.training.rope import attention_factor, rope_frequencies
from tests.families.variants import SIZES, random_model, write
from tests.families.variants import tokens as family_tokens
from tests.training import peers

SHORT = (1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1)
LONG = (1.2, 2.5, 5.0, 9.0, 10.0, 11.0, 12.0)
SCALINGS = {
    "linear": LinearRopeScaling(3.0),
    "dynamic": DynamicRopeScaling(3.0),
    "llama3": Llama3RopeScaling(8.0, 1.0, 4.0, 64),
    "yarn": YarnRopeScaling(3.7, 128),
    "yarn, no factor to speak of": YarnRopeScaling(1.0, 128),
    "yarn, own ramp": YarnRopeScaling(4.0, 128, beta_fast=6.0, beta_slow=1.5),
    "yarn, ramp between whole pairs": YarnRopeScaling(4.0, 128, 6.0, 1.5, truncate=False),
    "yarn, ramp of no width": YarnRopeScaling(4.0, 128, 3.0, 3.0, truncate=False),
    "yarn, ramp beyond all pairs": YarnRopeScaling(4.0, 2**30),
    "yarn, two weights": YarnRopeScaling(4.0, 128, mscale=0.7, mscale_all_dim=1.4),
    "yarn, one weight counts for nothing": YarnRopeScaling(4.0, 128, mscale=0.7),
    "yarn, own attention factor": YarnRopeScaling(4.0, 128, attention_factor=1.3),
    "longrope": LongRopeScaling(5.0, 64, SHORT, LONG),
    "longrope, no factor to speak of": LongRopeScaling(1.0, 64, SHORT, LONG),
    "longrope, own attention factor": LongRopeScaling(5.0, 64, SHORT, LONG, 1.7),
}


@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_are_bit_for_bit_those_of_transformers(scaling, length):
    cfg = peers.config(rope_theta=5000.0, rope_scaling=scaling)
    field = json.loads(json.dumps(rope_scaling_field(scaling)))
    peer = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=cfg.dims.hidden,
            num_attention_heads=cfg.dims.heads,
            head_dim=cfg.dims.head_dim,
            max_position_embeddings=cfg.max_seq_len,
            rope_theta=cfg.rope_theta,
            rope_scaling=field,
        )
    )
    cosine, _ = peer(torch.zeros(1, dtype=torch.float64), torch.arange(length)[None])
    expected = peer.inv_freq
    assert torch.equal(rope_frequencies(cfg, length=length), expected)
    # The cosine of position 0 is 1.
    assert attention_factor(scaling) == pytest.approx(cosine[0, 0, 0].item())


def test_llama_3_scaling_keeps_short_waves_and_stretches_long_ones():
    cfg = peers.config(head_dim=8, rope_theta=10000.0)
    plain = rope_frequencies(cfg)
    assert plain.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    scaled = rope_frequencies(
        peers.config(head_dim=8, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 128))
    )
    # Wavelengths 6.3 (< 128/4: kept), 62.8 (between), 628 and 6283 (> 128/1: divided by 8).
    share = (128 / (2 * torch.pi / 0.1) - 1.0) / (4.0 - 1.0)
    between = (1 - share) * 0.1 / 8 + share * 0.1
    assert scaled.tolist() == pytest.approx([1.0, between, 0.01 / 8, 0.001 / 8])


def test_yarn_keeps_pairs_that_turn_often_and_stretches_those_that_turn_less_than_once():
    scaling = YarnRopeScaling(4.0, 2000, beta_fast=10.0)
    scaled = rope_frequencies(peers.config(head_dim=8, rope_theta=10000.0, rope_scaling=scaling))
    # In 2000 tokens the pairs turn 318, 32, 3.2 and 0.3 times. Ten turns lie at pair
    # log(2000 / (2 pi 10)) / log(10) = 1.5 and one at 2.5: the ramp goes from pair 1 to 3.
    middle = 0.01 / 2 + 0.01 / 4 / 2
    assert scaled.tolist() == pytest.approx([1.0, 0.1, middle, 0.001 / 4])
    # Section 3.4 of the paper: sqrt(1 / t) = 0.1 ln(s) + 1.
    assert attention_factor(scaling) == pytest.approx(1.138629436)


def test_longrope_divides_each_pair_by_its_own_factor():
    scaling = LongRopeScaling(32.0, 4096, (1.0, 2.0, 4.0, 8.0), (5.0, 10.0, 20.0, 40.0))
    cfg = peers.config(head_dim=8, rope_theta=10000.0, rope_scaling=scaling)
    short, long = rope_frequencies(cfg, length=4096), rope_frequencies(cfg, length=4097)
    assert short.tolist() == pytest.approx([1.0, 0.05, 0.0025, 0.000125])
    assert long.tolist() == pytest.approx([0.2, 0.01, 0.0005, 0.000025])
    assert attention_factor(scaling) == pytest.approx(math.sqrt(1 + 5 / 12))


PHI3 = "phi3, longrope, rows beyond it"


@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_longrope_goes_by_the_length_of_the_whole_row_as_in_transformers(tmp_path, length):
    model = write(PHI3, tmp_path)
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    native = build_decoder(checkpointer.model_config, weights, torch.float64)
    rows = family_tokens(length=length)
    with torch.no_grad():
        expected = model.double()(rows).logits
        assert (native(rows) - expected).abs().max() < 1e-5


def test_a_packed_document_has_the_longrope_factors_of_its_own_length(tmp_path):
    model = write(PHI3, tmp_path)
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    native = build_decoder(checkpointer.model_config, weights, torch.float64)
    # The original context is of 16 tokens.
    lengths = (9, 17, 16, 20)
    rows = family_tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = native(rows, input_pos=positions, document_ids=documents)
        model.double()
        separate = torch.cat([model(part).logits for part in rows.split(lengths, dim=1)], dim=1)
    assert (packed - separate).abs().max() < 1e-5


def test_dynamic_scaling_is_that_of_transformers_up_to_the_last_token_of_the_context(tmp_path):
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    sizes = {**SIZES, "max_position_embeddings": 32}
    model = random_model("llama", {**sizes, "rope_parameters": scaled})
    model.save_pretrained(tmp_path)
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    native = build_decoder(checkpointer.model_config, weights, torch.float64)
    rows = family_tokens(length=32)
    with torch.no_grad():
        expected = model.double()(rows).logits
        assert (native(rows) - expected).abs().max() < 1e-5
