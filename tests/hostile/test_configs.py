"""A config.json or params.json with fields of any type and size."""

import json

import pytest

from checkpointing.families import FAMILIES
from tests.hostile import samples
from tests.hostile.harness import cases, fuzz, survives
from tests.hostile.mutations import json_files

_HF_FIELDS = (
    *("layer_types", "sliding_window", "rope_scaling", "rope_parameters", "text_config"),
    *("vision_config", "no_rope_layers", "num_experts", "num_experts_per_tok", "architectures"),
    *("head_dim", "rope_theta", "hidden_activation", "use_sliding_window", "max_window_layers"),
    *("layer_types_cycle", "no_rope_layer_interval", "partial_rotary_factor", "mlp_only_layers"),
    *("original_max_position_embeddings", "quantization_config", "query_pre_attn_scalar"),
)
_META_FIELDS = ("ffn_dim_multiplier", "use_scaled_rope", "rope_scaling_factor", "multiple_of")


def _check_file(count, file, readers, fields, root):
    def check(content):
        file.write_bytes(content)
        for read in readers:
            survives(read, root)

    fuzz(count, json_files(json.loads(file.read_text()), fields), check)


@cases(80, 1500)
def test_a_config_json_is_read_or_refused_with_its_name(tmp_path, count):
    directory = samples.write_hf_model(tmp_path / "model")
    readers = samples.model_readers(directory, "hf")
    _check_file(count, directory / "config.json", readers, _HF_FIELDS, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@cases(8, 60)
def test_a_config_json_of_any_family_is_read_or_refused_with_its_name(tmp_path, family, count):
    directory = samples.write_hf_model(tmp_path / "model")
    file = directory / "config.json"
    fields = {**json.loads(file.read_text()), **FAMILIES[family].hf_defaults}
    model_type = family.removesuffix("_classifier")
    file.write_text(json.dumps({**fields, "model_type": model_type}))
    # Its tensors are another family's, so nothing loads; what the fields say is read before.
    readers = samples.model_readers(directory, "hf")[:1]
    _check_file(count, file, readers, _HF_FIELDS, tmp_path)


@cases(30, 300)
def test_params_json_is_read_or_refused_with_its_name(tmp_path, count):
    directory = samples.write_meta_model(tmp_path / "model")
    readers = samples.model_readers(directory, "meta")
    _check_file(count, directory / "params.json", readers, _META_FIELDS, tmp_path)


@cases(30, 300)
def test_params_json_beside_native_weights_is_read_or_refused_with_its_name(tmp_path, count):
    directory = samples.write_tune_model(tmp_path / "model")
    readers = samples.model_readers(directory, "tune")
    _check_file(count, directory / "params.json", readers, _META_FIELDS, tmp_path)
