import json

import pytest
import torch
from safetensors.torch import save_file

from checkpointing import FullModelTorchTuneCheckpointer
from checkpointing.errors import ConfigError, TensorMismatchError
from tests.tiny import assert_same_tensors, random_native
from tests.training.peers import config, hf_model

CONFIG = config()


def write_tune(directory, suffix, with_config=True):
    native = random_native(CONFIG)
    items = list(native.items())
    directory.mkdir()
    for number, part in enumerate((items[:9], items[9:]), 1):
        path = directory / f"model-{number:05d}-of-00002{suffix}"
        save_file(dict(part), path) if suffix == ".safetensors" else torch.save(dict(part), path)
    if with_config:
        hf_model(CONFIG).config.save_pretrained(directory)
    return native


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".safetensors"])
def test_native_files_load_as_they_are_and_are_saved_as_one_bin_file(tmp_path, suffix):
    native = write_tune(tmp_path / "base", suffix)
    checkpointer = FullModelTorchTuneCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    assert_same_tensors(weights, native)
    assert checkpointer.model_config == CONFIG
    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    assert_same_tensors(torch.load(saved / "model-00001-of-00001.bin"), native)
    assert FullModelTorchTuneCheckpointer(saved).model_config == CONFIG


def test_native_weights_without_a_config_load_but_cannot_be_built(tmp_path):
    native = write_tune(tmp_path / "base", ".bin", with_config=False)
    checkpointer = FullModelTorchTuneCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    assert_same_tensors(checkpointer.load_checkpoint()["model"], native)
    checkpointer.save_checkpoint({"model": native}, epoch=0)
    with pytest.raises(ConfigError, match=r"has neither config\.json nor params\.json"):
        checkpointer.model_config  # noqa: B018


def test_a_params_json_serves_as_config_too(tmp_path):
    dims = CONFIG.dims
    native = write_tune(tmp_path / "base", ".bin", with_config=False)
    params = {"dim": 42, "n_heads": 6, "n_kv_heads": 2, "head_dim": 14, "norm_eps": 1e-5}
    (tmp_path / "base" / "params.json").write_text(json.dumps(params))
    checkpointer = FullModelTorchTuneCheckpointer(tmp_path / "base")
    assert checkpointer.model_config.dims == dims
    assert_same_tensors(checkpointer.load_checkpoint()["model"], native)


def test_native_weights_are_checked_against_the_config_beside_them(tmp_path):
    write_tune(tmp_path / "base", ".bin")
    torch.save({"layers.7.sa_norm.scale": torch.ones(42)}, tmp_path / "base" / "more.bin")
    with pytest.raises(TensorMismatchError, match=r"layers.7.sa_norm.scale: unexpected"):
        FullModelTorchTuneCheckpointer(tmp_path / "base").load_checkpoint()


def test_a_file_is_never_loaded_so_that_it_could_run_code(tmp_path):
    write_tune(tmp_path / "base", ".bin")
    checkpointer = FullModelTorchTuneCheckpointer(tmp_path / "base")
    with pytest.raises(ConfigError, match="no code in a checkpoint is ever run"):
        checkpointer.load_checkpoint(weights_only=False)
