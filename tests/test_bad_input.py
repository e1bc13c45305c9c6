"""Bad input gets an error that names file, tensor and remedy, and nothing is written."""

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpointing import (
    AdapterConfig,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
)
from checkpointing.errors import (
    CheckpointingError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    OutOfSpaceError,
    TensorMismatchError,
    UnsafePathError,
)
from tests.formats.test_meta import PARAMS, meta_weights, write_meta
from tests.tiny import ATTENTION, random_adapter, random_native, write_hf
from tests.training.peers import config, hf_model

CONFIG = config()
INDEX = "model.safetensors.index.json"


@pytest.fixture
def base(tmp_path):
    return write_hf(hf_model(CONFIG), tmp_path / "base", max_shard_size="60KB")


@pytest.fixture
def single(tmp_path):
    return write_hf(hf_model(CONFIG), tmp_path / "single")


def refused(error, directory, match, checkpointer=FullModelHFCheckpointer, **options):
    """Loading fails with the error, and no output directory appears."""
    out = directory.parent / "out"
    with pytest.raises(error, match=match) as caught:
        checkpointer(directory, output_dir=out, **options).load_checkpoint()
    assert isinstance(caught.value, CheckpointingError)
    assert not out.exists()
    return caught.value


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def edit_index(base, change):
    content = json.loads((base / INDEX).read_text())
    change(content["weight_map"])
    (base / INDEX).write_text(json.dumps(content))


def test_a_checkpoint_dir_that_is_not_there(tmp_path):
    refused(CheckpointNotFoundError, tmp_path / "no", "is no directory; download the model first")


def test_a_directory_without_weights(tmp_path, single):
    (single / "model.safetensors").unlink()
    refused(CheckpointNotFoundError, single, r"holds none of model\.safetensors")


def test_listed_files_that_are_not_there_are_all_named(base):
    files = ["model-00001-of-00009.safetensors", "model-00007-of-00009.safetensors"]
    error = refused(CheckpointNotFoundError, base, "not there", checkpoint_files=files)
    assert all(file in str(error) for file in files)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "at least one"),
        (["a.bin", "a.bin"], "name every file once"),
        ({"filename_format": "model-{}.safetensors", "max_filename": "00002"}, "two {}"),
        ({"filename_format": "m-{}-{}.bin", "max_filename": "last"}, "must be a number"),
        ({"filename_format": "m-{}-{}.bin"}, "give filename_format"),
    ],
)
def test_a_description_of_files_that_makes_no_sense(base, files, says):
    refused(ConfigError, base, says, checkpoint_files=files)


def test_an_index_that_names_a_missing_file(base):
    edit_index(base, lambda weight_map: weight_map.update({"x": "model-00099.safetensors"}))
    refused(CheckpointNotFoundError, base, r"not there: model-00099\.safetensors")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3, "..\\secret"]
)
def test_an_index_that_points_outside_the_directory(base, name):
    save_file({"x": torch.ones(1)}, base.parent / "secret.safetensors")
    edit_index(base, lambda weight_map: weight_map.update({"x": name}))
    refused(UnsafePathError, base, "not a plain file name")


def test_an_index_that_puts_a_tensor_into_the_wrong_file(base):
    def swap(weight_map):
        weight_map["model.norm.weight"] = weight_map["model.embed_tokens.weight"]

    edit_index(base, swap)
    refused(CorruptCheckpointError, base, r"says wrongly where tensors are: model\.norm\.weight")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none(base, text):
    (base / INDEX).write_text(text)
    refused(CorruptCheckpointError, base, INDEX)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1000, -1])
def test_a_truncated_safetensors_file(single, keep):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(CorruptCheckpointError, single, r"model\.safetensors .* cannot be read .* get it anew")


def test_a_safetensors_header_that_claims_to_be_huge(single):
    path = single / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    refused(CorruptCheckpointError, single, r"model\.safetensors")


@pytest.mark.parametrize("keep", [0, 100, -1000])
def test_a_truncated_bin_file(single, keep):
    tensors = load_file(single / "model.safetensors")
    (single / "model.safetensors").unlink()
    path = single / "pytorch_model.bin"
    torch.save(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    refused(CorruptCheckpointError, single, r"pytorch_model\.bin .* cannot be read")


class Harmful:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_bin_file_with_code_runs_none_of_it(tmp_path, single, legacy):
    (single / "model.safetensors").unlink()
    harm = tmp_path / "harm"
    content = {"model.norm.weight": torch.ones(42), "x": Harmful(harm)}
    torch.save(content, single / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    refused(CorruptCheckpointError, single, "cannot be read")
    (single / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(harm)))
    refused(CorruptCheckpointError, single, "cannot be read")
    assert not harm.exists()


def test_a_bin_file_that_holds_no_flat_state_dict(single):
    (single / "model.safetensors").unlink()
    torch.save({"model": {"x": torch.ones(2)}, "step": 3}, single / "pytorch_model.bin")
    refused(CorruptCheckpointError, single, r"no tensor under \['model', 'step'\]")
    torch.save([torch.ones(2)], single / "pytorch_model.bin")
    refused(CorruptCheckpointError, single, "holds a list")


def test_all_missing_unexpected_and_misshapen_tensors_are_in_one_error(single):
    path = single / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.gate_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(84, 42)
    tensors["model.layers.2.self_attn.q_norm.weight"] = torch.ones(14)
    save_file(tensors, path)
    error = refused(TensorMismatchError, single, "single: 3 problems")
    assert set(error.problems) == {
        "model.layers.1.mlp.gate_proj.weight: missing, expected [56, 42]",
        "model.layers.0.self_attn.k_proj.weight: [84, 42], expected [28, 42]",
        "model.layers.2.self_attn.q_norm.weight: unexpected, [14]",
    }


def test_a_tensor_that_stands_in_two_files(base):
    tensors = load_file(base / "model-00001-of-00005.safetensors")
    save_file(tensors, base / "again.safetensors")
    files = [path.name for path in base.glob("*.safetensors")]
    refused(CorruptCheckpointError, base, "also stands in", checkpoint_files=files)


def test_a_config_of_another_family(single):
    edit_json(single / "config.json", model_type="gpt2")
    refused(ConfigError, single, "'gpt2' is not supported")
    refused(ConfigError, single, "contradicts model_type=LLAMA3", model_type="LLAMA3")


def test_a_model_type_that_contradicts_the_config(single):
    refused(ConfigError, single, "MISTRAL means 'mistral'", model_type="MISTRAL")


def test_an_unknown_model_type_gets_the_nearest_name(single):
    refused(ConfigError, single, "did you mean 'LLAMA3_2'", model_type="LLAMA32")


def test_a_config_that_names_no_family(single):
    raw = json.loads((single / "config.json").read_text())
    del raw["model_type"]
    (single / "config.json").write_text(json.dumps(raw))
    refused(ConfigError, single, "give the checkpointer's model_type")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "42"),
        ("num_attention_heads", None),
        ("num_attention_heads", 5),
        ("head_dim", 15),
        ("num_hidden_layers", -1),
        ("vocab_size", 1.5),
        ("num_key_value_heads", True),
        ("rms_norm_eps", "1e-5"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8}),
        ("rope_parameters", {"rope_theta": -1}),
        ("rope_parameters", "default"),
        ("max_position_embeddings", 0),
    ],
)
def test_sizes_that_are_none(single, key, value):
    edit_json(single / "config.json", **{key: value})
    refused(ConfigError, single, r"config\.json: ")


def test_a_config_for_other_weights(single):
    edit_json(single / "config.json", num_hidden_layers=4, intermediate_size=57)
    error = refused(TensorMismatchError, single, "3 layers|4 layers")
    assert len(error.problems) == 9 + 3 * 3


def test_a_missing_config(single):
    (single / "config.json").unlink()
    refused(CheckpointNotFoundError, single, r"config\.json: no such file")


def test_directories_that_lie_in_each_other(single):
    for out in (single, single / "out", single.parent):
        with pytest.raises(ConfigError, match="lie in each other"):
            FullModelHFCheckpointer(single, output_dir=out)
    assert not (single / "out").exists()


def test_a_link_does_not_hide_that_they_do(tmp_path, single):
    (tmp_path / "link").symlink_to(single)
    with pytest.raises(ConfigError, match="lie in each other"):
        FullModelHFCheckpointer(single, output_dir=tmp_path / "link" / "out")


def test_an_adapter_for_a_base_of_other_sizes(tmp_path, single):
    adapter_config = AdapterConfig(4, 6, ("q_proj", "w2"))
    other = config(ffn=60, layers=4)
    torch.save(random_adapter(other.dims, adapter_config), tmp_path / "adapter_model.pt")
    error = refused(
        TensorMismatchError,
        single,
        r"adapter_model\.pt",
        adapter_checkpoint=tmp_path / "adapter_model.pt",
    )
    assert "layers.3.attn.q_proj: the base has no such linear module" in error.problems
    assert "layers.0.mlp.w2.lora_a.weight: [4, 60], expected [4, 56]" in error.problems


def test_an_adapter_that_does_not_fit_is_not_saved(single):
    checkpointer = FullModelHFCheckpointer(single, output_dir=single.parent / "out")
    wrong = random_adapter(config(ffn=60).dims, AdapterConfig(4, 6, ("w2",)))
    state = {"adapter": wrong, "adapter_config": AdapterConfig(4, 6, ("w2",)).to_state()}
    with pytest.raises(TensorMismatchError, match=r"expected \[4, 56\]"):
        checkpointer.save_checkpoint(state, 0, adapter_only=True)
    right = random_adapter(CONFIG.dims, AdapterConfig(4, 6, ATTENTION))
    wrong_rank = {"adapter": right, "adapter_config": AdapterConfig(5, 6, ATTENTION).to_state()}
    with pytest.raises(TensorMismatchError, match=r"\[4, 42\], expected \[5, 42\]"):
        checkpointer.save_checkpoint(wrong_rank, 0, adapter_only=True)
    assert not (single.parent / "out").exists()


def test_an_adapter_file_that_is_not_there(single):
    refused(CheckpointNotFoundError, single, "neither by itself", adapter_checkpoint="no.pt")


def test_nothing_to_resume_from(single):
    options = {"should_load_recipe_state": True}
    refused(CheckpointNotFoundError, single, "holds no complete checkpoint", **options)
    options = {"should_load_recipe_state": str(single)}
    refused(CheckpointNotFoundError, single, r"has no manifest\.json", **options)


def test_no_room_on_the_disk(single, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 50_000, 50_000))
    checkpointer = FullModelHFCheckpointer(single, output_dir=single.parent / "out")
    state = checkpointer.load_checkpoint()
    with pytest.raises(OutOfSpaceError, match="make room or choose another output_dir"):
        checkpointer.save_checkpoint(state, epoch=0)
    assert not (single.parent / "out").exists()


def test_a_disk_that_fills_up_while_saving_leaves_the_checkpoint_before(single, monkeypatch):
    import errno

    from checkpointing.storage import new_file

    out = single.parent / "out"
    checkpointer = FullModelHFCheckpointer(single, output_dir=out)
    state = checkpointer.load_checkpoint()
    checkpointer.save_checkpoint({**state, "steps_run": 1}, epoch=0)
    files = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    whole = new_file.tensor_bytes

    def full(tensor):
        if tensor.shape == (42, 56):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(tensor)

    monkeypatch.setattr(new_file, "tensor_bytes", full)
    for epoch in (0, 1):
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save_checkpoint({**state, "steps_run": 2}, epoch)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == files
    assert [path.name for path in out.iterdir()] == ["epoch_0"]


def test_wrong_options(single):
    with pytest.raises(ConfigError, match="would keep nothing"):
        FullModelHFCheckpointer(single, keep_last_n_checkpoints=0)
    with pytest.raises(ConfigError, match="is no size"):
        FullModelHFCheckpointer(single, max_shard_size="much")
    with pytest.raises(ConfigError, match="enable_dcp"):
        FullModelHFCheckpointer(single, enable_dcp=True)
    with pytest.raises(ConfigError, match="output_dir: not given"):
        FullModelHFCheckpointer(single).save_checkpoint({}, epoch=0)


def meta_base(tmp_path, ranks=2, **params):
    weights = meta_weights(random_native(config(vocab=132)))
    return write_meta(tmp_path / "base", weights, ranks, 0, {**PARAMS, "vocab_size": 132, **params})


def test_a_meta_shard_that_is_missing(tmp_path):
    base = meta_base(tmp_path, ranks=2)
    (base / "consolidated.00.pth").unlink()
    refused(
        CheckpointNotFoundError,
        base,
        r"numbered \[1\], but must be 0 to",
        FullModelMetaCheckpointer,
    )


def test_a_last_meta_shard_that_is_missing(tmp_path):
    base = meta_base(tmp_path, ranks=2)
    (base / "consolidated.01.pth").unlink()
    says = "vocab_size is 132, but the embedding has 66 rows"
    refused(ConfigError, base, says, FullModelMetaCheckpointer)


def test_a_directory_of_meta_without_shards_or_params(tmp_path):
    base = meta_base(tmp_path, ranks=1)
    (base / "params.json").unlink()
    refused(CheckpointNotFoundError, base, r"params\.json: no such file", FullModelMetaCheckpointer)
    (base / "consolidated.00.pth").unlink()
    refused(CheckpointNotFoundError, base, r"no consolidated\.NN\.pth", FullModelMetaCheckpointer)


def test_params_that_contradict_the_weights(tmp_path):
    base = meta_base(tmp_path, ranks=1, n_kv_heads=3)
    error = refused(TensorMismatchError, base, "6 problems", FullModelMetaCheckpointer)
    assert "layers.0.attention.wk.weight: [28, 42], expected [42, 42]" in error.problems


def test_a_tune_directory_without_weights(tmp_path):
    (tmp_path / "base").mkdir()
    torch.save({}, tmp_path / "base" / "recipe_state.pt")
    refused(
        CheckpointNotFoundError,
        tmp_path / "base",
        "holds no weights",
        FullModelTorchTuneCheckpointer,
    )
