"""Rotary positions in config.json mean what transformers takes them for, in old and new names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpointing import FullModelHFCheckpointer
from checkpointing.errors import ConfigError
from checkpointing.training import build_decoder
from tests.families.variants import PHI3_SIZES, SIZES, random_model, tokens

ROPE_FIELDS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "sliding_window_pattern",
    "layer_types",
)
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 5.0],
}
# As Phi-3-mini-128k and Phi-4-mini have it; 6 of the 10 elements of a head are rotated.
LONG_CONTEXT = {
    **PHI3_SIZES,
    "rope_theta": 500.0,
    "rope_scaling": LONG,
    "partial_rotary_factor": 0.6,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
}
GEMMA3 = {"sliding_window": 7, "sliding_window_pattern": 2}

WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "older names": ("llama", {"rope_theta": 500.0, "rope_scaling": {**LINEAR, "rope_theta": 50.0}}),
    "oldest name of the kind": ("llama", {"rope_scaling": {"type": "linear", "factor": 8.0}}),
    "nothing scaled": ("llama", {"rope_theta": 500.0, "rope_scaling": None}),
    "both names": (
        "llama",
        {"rope_parameters": {**YARN, "rope_theta": 50.0}, "rope_scaling": LINEAR},
    ),
    "original context beside the scaling": (
        "qwen2",
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    ),
    "no original context": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "no factor": ("llama", {"rope_scaling": {**YARN, "factor": None}}),
    "zeros": ("llama", {"rope_scaling": {**YARN, "beta_fast": 0, "beta_slow": 0, "mscale": 0}}),
    "llama 3 with no original context": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "phi 3": ("phi3", LONG_CONTEXT),
    "phi 3 of the first release": (
        "phi3",
        {
            **LONG_CONTEXT,
            # transformers 5 does not find the field beside it for this name.
            "rope_scaling": {**LONG, "type": "su", "original_max_position_embeddings": 16},
        },
    ),
    "phi 3 with the name of another kind": (
        "phi3",
        {**LONG_CONTEXT, "rope_scaling": {**LONG, "type": "yarn"}},
    ),
    "phi 3 with its own original context": (
        "phi3",
        {
            **LONG_CONTEXT,
            "rope_scaling": {**LONG, "original_max_position_embeddings": 16, "factor": 3.0},
            "original_max_position_embeddings": None,
        },
    ),
    "gemma 3 with older names": (
        "gemma3_text",
        {**GEMMA3, "rope_theta": 700.0, "rope_local_base_freq": 50.0, "rope_scaling": LINEAR},
    ),
    "gemma 3 with nothing": ("gemma3_text", GEMMA3),
    "gemma 3 with one type of layer": (
        "gemma3_text",
        {
            **GEMMA3,
            "rope_local_base_freq": 50.0,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": None},
        },
    ),
    "gemma 3 with scaled windows": (
        "gemma3_text",
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 700.0},
                "sliding_attention": {**LINEAR, "rope_theta": 50.0},
            },
        },
    ),
}


def write(directory: Path, model_type: str, fields: dict[str, Any]) -> None:
    """A tiny model with just these fields of rotary positions in its config.json."""
    sizes = {key: fields[key] for key in PHI3_SIZES if key in fields}
    random_model(model_type, {**SIZES, **sizes}).save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if key not in ROPE_FIELDS}
    given = {key: value for key, value in fields.items() if value is not None}
    (directory / "config.json").write_text(json.dumps({**kept, **given}))


@pytest.mark.parametrize(("model_type", "fields"), WRITTEN.values(), ids=WRITTEN.keys())
def test_a_config_means_what_transformers_takes_it_for(tmp_path, model_type, fields):
    write(tmp_path, model_type, fields)
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    native = build_decoder(checkpointer.model_config, weights, torch.float64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).double()
    with torch.no_grad():
        expected = model(tokens()).logits
        assert expected.std() > 0.1
        assert (native(tokens()) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear"}, "factor is None"),
        ({"rope_type": "linear", "factor": "8"}, "factor is '8'"),
        ({"rope_type": "dynamic", "factor": -2.0}, "factor is -2.0"),
        ({"rope_type": ["yarn"]}, "rope_type is"),
        ("linear", "rope_scaling is 'linear'"),
        ({**YARN, "factor": True}, "factor is True"),
        ({**YARN, "original_max_position_embeddings": 0.5}, "original_max_position_embeddings is"),
        ({**YARN, "beta_fast": "32"}, "beta_fast is '32'"),
        ({**YARN, "mscale": -1}, "mscale is -1"),
        ({**YARN, "attention_factor": 0}, "attention_factor is 0"),
        ({**YARN, "truncate": "no"}, "truncate is 'no'"),
        ({**LONG, "short_factor": None}, "short_factor must be a list of 7 numbers"),
        ({**LONG, "short_factor": [1.0] * 6}, "short_factor must be a list of 7 numbers"),
        ({**LONG, "short_factor": [1.0] * 6 + [0.0]}, "short_factor is 0.0"),
        ({**LONG, "short_factor": [1.0] * 7}, "long_factor must be a list of 7 numbers"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor is"),
    ],
)
def test_a_field_that_is_missing_or_not_of_its_type_is_refused(tmp_path, scaling, named):
    write(tmp_path, "llama", {"rope_scaling": scaling})
    with pytest.raises(ConfigError, match=r"config\.json: ") as caught:
        _ = FullModelHFCheckpointer(tmp_path).model_config
    assert named in str(caught.value)


def test_a_scaling_of_one_type_of_layer_that_is_unknown_is_named(tmp_path):
    rope = {"full_attention": {"rope_type": "spiral"}, "sliding_attention": {"rope_type": "knot"}}
    write(tmp_path, "gemma3_text", {**GEMMA3, "rope_parameters": rope})
    unsupported = FullModelHFCheckpointer(tmp_path).model_config.unsupported
    assert unsupported == ("rope_type 'spiral'", "rope_type 'knot'")


def test_positions_by_type_of_layer_in_a_family_without_are_not_trained_on(tmp_path):
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": LINEAR}
    write(tmp_path, "qwen3", {"rope_parameters": rope})
    config = FullModelHFCheckpointer(tmp_path).model_config
    assert config.unsupported == ("rope_parameters for each type of layer",)


def test_gemma_3_that_looks_at_later_tokens_is_not_trained_on(tmp_path):
    write(tmp_path, "gemma3_text", {**GEMMA3, "use_bidirectional_attention": True})
    config = FullModelHFCheckpointer(tmp_path).model_config
    assert config.unsupported == ("use_bidirectional_attention",)
