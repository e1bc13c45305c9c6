"""Megatron's distributed checkpoints; their tensors are laid out by hand, their files DCP's own."""

import argparse
import pickle
import shutil
from itertools import count

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.cli.main import main
from checkpointing.errors import ConfigError, CorruptCheckpointError, UnsafePathError
from checkpointing.formats.detect import find_model
from tests.formats.megatron_model import (
    OfTheTrainer,
    config_of,
    hf_weights,
    megatron_weights,
    numbers,
    with_padding,
    write_hf,
    write_root,
)
from tests.tiny import assert_same_tensors

MODELS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def native(directory):
    source = find_model(directory).open().native
    return {name: source.read(name) for name in source.metas}


def without_numbers(name):
    """Layers and experts are stacked under one name (``decoder.layers.mlp...``)."""
    words = name.split(".")
    if "local_experts" in words:
        place = words.index("local_experts")
        words[place : place + 2] = ["experts"]
    return ".".join(words[:2] + words[3:])


def stacked(weights):
    """As a model of layers that are all alike is stored."""
    out, groups = {}, {}
    for name, tensor in weights.items():
        layer, expert = numbers(name)
        if layer is None:
            out[name] = tensor
        else:
            groups.setdefault(without_numbers(name), {})[layer, expert] = tensor
    for name, parts in groups.items():
        layers = sorted({layer for layer, _ in parts})
        experts = sorted({expert for _, expert in parts if expert is not None})
        out[name] = torch.stack(
            [
                torch.stack([parts[layer, expert] for expert in experts])
                if experts
                else parts[layer, None]
                for layer in layers
            ]
        )
    return out


def layer_by_layer(weights):
    """As a model is stored of which the layers differ: experts alone are stacked."""
    out, groups = {}, {}
    for name, tensor in weights.items():
        if ".local_experts." not in name:
            out[name] = tensor
            continue
        start, _, rest = name.partition(".local_experts.")
        number, _, end = rest.partition(".")
        groups.setdefault(f"{start}.experts.{end}", {})[int(number)] = tensor
    return out | {n: torch.stack([parts[e] for e in sorted(parts)]) for n, parts in groups.items()}


def one_by_one(weights):
    """As newer checkpoints are stored: every expert, and gate and up, by themselves."""
    out = {}
    for name, tensor in weights.items():
        name = name.replace(".local_experts.", ".experts.")
        if "linear_fc1." in name and "layer_norm" not in name:
            out[f"{name}_w"], out[f"{name}_v"] = tensor.chunk(2)
        else:
            out[name] = tensor
    return {name: tensor.contiguous() for name, tensor in out.items()}


def write_dist(directory, hf, layout, settings=None):
    """A checkpoint that one process has written."""
    config = config_of(hf)
    weights = megatron_weights(hf_weights(hf), config["num_key_value_heads"])
    stored = layout(with_padding(weights, 384, fill=0.3))
    stored |= {
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.ones(3, 5),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3": OfTheTrainer(),
    }
    iteration = write_root(directory, hf)
    dcp.save(stored, checkpoint_id=iteration, no_dist=True)
    if settings is not None:
        args = argparse.Namespace(activation=print, **settings)
        torch.save({"args": args, "iteration": 12, "odd": OfTheTrainer()}, iteration / "common.pt")
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of models of transformers, made when they are asked for."""
    root = tmp_path_factory.mktemp("models")

    def model(name):
        directory = root / name.replace(", ", "_")
        model_type, options = MODELS[name]
        return directory if directory.is_dir() else write_hf(directory, model_type, **options)

    return model


@pytest.mark.parametrize("layout", [stacked, layer_by_layer, one_by_one])
@pytest.mark.parametrize("name", MODELS)
def test_a_distributed_checkpoint_holds_the_same_model(models, tmp_path, name, layout):
    found = write_dist(tmp_path / "dist", models(name), layout)
    assert find_model(found).format.name == "megatron"
    assert_same_tensors(native(found), native(models(name)))


def test_one_command_makes_a_hugging_face_model_of_it(models, tmp_path):
    found = write_dist(tmp_path / "dist", models("mixtral"), stacked, {"num_attention_heads": 6})
    iteration = found / "iter_0000012"
    # Either directory can be given, if the config is there.
    shutil.copyfile(found / "config.json", iteration / "config.json")
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert main(["convert", str(iteration), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }
    assert_same_tensors(hf_weights(tmp_path / "hf"), hf_weights(models("mixtral")))
    assert main(["inspect", str(found)]) == 0


@pytest.mark.parametrize("where", ["common.pt", "run_config.yaml"])
def test_settings_of_another_model_are_refused(models, tmp_path, where):
    settings = {"num_query_groups": 3}
    in_common = settings if where == "common.pt" else None
    found = write_dist(tmp_path / "dist", models("llama"), stacked, in_common)
    if in_common is None:
        (found / "iter_0000012/run_config.yaml").write_text(
            "model:\n  _target_: megatron.bridge.GPTModelProvider\n  num_query_groups: 3\n"
        )
    with pytest.raises(ConfigError, match="num_query_groups is 3, not 2"):
        native(found)


def write_pieces(iteration, tensors, cuts):
    """A checkpoint of several ranks, in DCP's own classes: each tensor in pieces of a grid.

    Args:
        iteration: directory to write.
        tensors: whole.
        cuts: by name, in how many parts each of the dimensions is cut.
    """
    iteration.mkdir()
    numbers = count()
    state, storage = {}, {}
    for name, tensor in tensors.items():
        pieces = [((), tensor)]
        for dim, parts in enumerate(cuts(name, tensor)):
            pieces = [
                ((*offsets, number * (tensor.shape[dim] // parts)), piece)
                for offsets, whole in pieces
                for number, piece in enumerate(whole.chunk(parts, dim))
            ]
        chunks = []
        for offsets, piece in pieces:
            # Two files, and in either one behind the other, as ranks write them.
            file = iteration / f"__{next(numbers) % 2}_0.distcp"
            with file.open("ab") as stream:
                start = stream.tell()
                torch.save(piece.clone(), stream)
                info = _StorageInfo(file.name, start, stream.tell() - start)
            storage[MetadataIndex(name, offsets)] = info
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), piece.shape))
        properties = TensorProperties(dtype=tensor.dtype)
        state[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
    metadata = Metadata(state_dict_metadata=state, storage_data=storage)
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))


def megatron_cuts(name, tensor):
    """How two tensor-parallel ranks, and a stage for each layer, have the stacked tensors."""
    parts = [1] * tensor.dim()
    if name.startswith("decoder.layers."):
        parts[0] = len(tensor)
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        parts[-1] = 2
    elif "linear_qkv.weight" in name or "embedding" in name or "output_layer" in name:
        parts[-2] = 2
    elif "linear_fc1.weight" in name:
        # Gate and up of either rank.
        parts[-2] = 4
    return parts


@pytest.mark.parametrize("name", MODELS)
def test_the_pieces_of_many_ranks_are_joined(models, tmp_path, name):
    hf = models(name)
    weights = megatron_weights(hf_weights(hf), config_of(hf)["num_key_value_heads"])
    iteration = write_root(tmp_path / "dist", hf)
    write_pieces(iteration, stacked(with_padding(weights, 256)), megatron_cuts)
    assert_same_tensors(native(tmp_path / "dist"), native(hf))
    # And a few rows at a time.
    source = find_model(tmp_path / "dist").open().native
    rows = source.rows("layers.1.attn.output_proj.weight")
    whole = source.read("layers.1.attn.output_proj.weight")
    assert torch.equal(torch.cat([rows.read(0, 5), rows.read(5, 42)]), whole)


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.fixture
def dist(models, tmp_path):
    hf = models("llama")
    weights = megatron_weights(hf_weights(hf), 2)
    iteration = write_root(tmp_path / "dist", hf)
    write_pieces(iteration, stacked(with_padding(weights, 256)), megatron_cuts)
    return tmp_path / "dist"


def rewrite(directory, change):
    path = directory / "iter_0000012/.metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_code_in_the_description_or_in_a_piece_is_not_run(dist, tmp_path):
    marker = tmp_path / "marker"
    rewrite(dist, lambda metadata: setattr(metadata, "planner_data", Call(open, str(marker), "w")))
    native(dist)
    assert not marker.exists()
    path = dist / "iter_0000012/.metadata"
    path.write_bytes(pickle.dumps(Call(open, str(marker), "w")))
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata: cannot be read"):
        native(dist)
    assert not marker.exists()


def _gap(metadata):
    metadata.state_dict_metadata["output_layer.weight"].chunks.pop()


def _longer(metadata):
    metadata.state_dict_metadata["output_layer.weight"].size = torch.Size((1 << 40, 42))


def _many_layers(metadata):
    one = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    one.size = torch.Size((1 << 40, 42))
    one.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), one.size)]


def _far(metadata):
    next(iter(metadata.storage_data.values())).length = 1 << 50


def _overlapping(metadata):
    chunks = metadata.state_dict_metadata["output_layer.weight"].chunks
    chunks[1].offsets = chunks[0].offsets


def _elsewhere(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../../config.json"


@pytest.mark.parametrize("change", [_gap, _longer, _many_layers, _far, _overlapping, _elsewhere])
def test_a_description_that_lies_is_refused(dist, change):
    rewrite(dist, change)
    with pytest.raises((CorruptCheckpointError, UnsafePathError), match=r"\.metadata"):
        native(dist)


def test_a_piece_that_is_damaged_is_named(dist):
    file = dist / "iter_0000012/__1_0.distcp"
    shutil.copyfile(dist / "config.json", file)
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp"):
        native(dist)
