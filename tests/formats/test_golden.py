"""Plans of loading and saving public models, from the lists of their tensors alone."""

import json
from math import prod

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.families import FAMILIES
from checkpointing.formats.hf import HFFormat
from checkpointing.formats.hf_config import parse_hf_config, read_hf_config
from checkpointing.formats.hf_names import read_names
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.plan import plan_to_foreign, plan_to_native
from checkpointing.mapping.tensors import Rows
from tests.golden import golden_models

GOLDEN = golden_models()
LOADED = [name for name, model in GOLDEN.items() if model.model_type in FAMILIES]
MULTIMODAL = [name for name in GOLDEN if "vision_config" in GOLDEN[name].config]
# Besides what is left of the golden models, what allenai/olmOCR-7B-0225-preview says of itself.
OLMOCR = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "vision_config": {"depth": 32, "embed_dim": 1280},
}
REFUSED = [GOLDEN[name].config for name in GOLDEN if name not in LOADED] + [OLMOCR]

# Tensors that a published model has and that hold nothing of their own.
EXTRAS = {
    "vicuna-7b-delta-v0": {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(32)},
    "gemma-2b-early": {"lm_head.weight"},
}

# transformers 5 has experts in one tensor, and calls parts of multimodal models otherwise.
PEERS = [
    name
    for name in GOLDEN
    if name not in MULTIMODAL and GOLDEN[name].model_type not in ("mixtral", "qwen3_moe")
]

SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class Headers:
    """Tensors of which there are only the headers."""

    def __init__(self, metas):
        self.metas = metas

    def read(self, name):
        # Meta tensors are all at the address 0: a head is a copy of the embedding.
        return torch.empty(self.metas[name].shape, device="meta")

    def rows(self, name):
        return Rows.of(self.read(name))


def layout_of(model, directory, **changes):
    """The layout that a model's config.json and tensors are read as, and its tensors."""
    (directory / "config.json").write_text(json.dumps({**model.config, **changes}))
    raw, family = read_hf_config(directory, None)
    names = read_names(model.metas, family, model.name)
    assert names.example is None
    source = names.over(Headers(model.metas))
    config = parse_hf_config(directory / "config.json", raw, family, "hf", source)
    return Layout(family, "hf", config.dims), source


@pytest.mark.parametrize("name", LOADED)
def test_every_tensor_of_a_public_model_is_claimed_once_and_saved_under_its_name(tmp_path, name):
    model = GOLDEN[name]
    layout, source = layout_of(model, tmp_path)
    plan = plan_to_native(layout, source.metas, name)
    claims: dict[str, list[int]] = {}
    for planned in plan.tensors:
        for key in planned.sources:
            claims.setdefault(key, []).append(prod(planned.meta.shape))
    kept = {key: meta for key, meta in model.metas.items() if key not in EXTRAS.get(name, ())}
    assert claims.keys() == kept.keys()
    # A fused tensor is claimed in parts, which are all of it.
    for key, parts in claims.items():
        assert len(parts) == 1 or sum(parts) == prod(kept[key].shape), key

    native = {planned.name: planned.meta for planned in plan.tensors}
    assert len(native) == len(plan.tensors)
    back = plan_to_foreign(layout, native, name)
    assert len(back.tensors) == len(kept)
    assert {planned.name: planned.meta for planned in back.tensors} == kept


@pytest.mark.parametrize("name", GOLDEN)
def test_the_list_of_a_public_model_has_the_published_size(name):
    model = GOLDEN[name]
    assert sum(meta.nbytes for meta in model.metas.values()) == model.total_size


@pytest.mark.parametrize("name", [name for name in GOLDEN if "index" in GOLDEN[name].content])
def test_the_list_of_a_public_model_is_as_long_as_the_published_index(name):
    index = GOLDEN[name].content["index"]
    weight_map = dict.fromkeys(GOLDEN[name].metas, index["shard"])
    content = {"metadata": index["metadata"], "weight_map": weight_map}
    assert index["metadata"]["total_size"] == GOLDEN[name].total_size
    assert len(json.dumps(content, indent=index["indent"])) == index["characters"]


@pytest.mark.parametrize("name", [name for name in GOLDEN if "files" in GOLDEN[name].content])
def test_the_list_of_a_public_model_makes_files_of_the_published_sizes(name):
    model = GOLDEN[name]
    sizes = [safetensors_size(shard) for shard in five_gigabyte_shards(model.metas)]
    assert sizes == list(model.content["files"].values())


def five_gigabyte_shards(metas):
    """The shards that transformers 4 makes: of at most 5 GB, in the order of the model."""
    shards, size = [{}], 0
    for name, meta in metas.items():
        if size + meta.nbytes > 5e9:
            shards.append({})
            size = 0
        shards[-1][name] = meta
        size += meta.nbytes
    return shards


def safetensors_size(metas):
    """Size of a safetensors file: eight bytes, the header padded to eight, and the data."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, meta in sorted(metas.items()):
        start, end = end, end + meta.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [start, end],
        }
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + end


@pytest.mark.parametrize("name", PEERS)
def test_the_list_of_a_public_model_is_that_of_transformers(name):
    model = GOLDEN[name]
    config = AutoConfig.for_model(**model.config)
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(config)
    tied = peer.all_tied_weights_keys
    shapes = {key: tensor.shape for key, tensor in peer.state_dict().items() if key not in tied}
    extras = EXTRAS.get(name, ())
    assert {key: meta.shape for key, meta in model.metas.items() if key not in extras} == shapes


@pytest.mark.parametrize("config", REFUSED, ids=lambda config: config["model_type"])
def test_a_public_model_of_another_family_is_refused_by_name(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        HFFormat().open(tmp_path, [], None)
    assert f"model_type {config['model_type']!r} is " in str(caught.value)
    assert ("multimodal" in str(caught.value)) == ("vision_config" in config)


def test_a_config_of_another_revision_than_the_index_is_refused(tmp_path):
    # This was published: config.json counts six tokens more than the tensors had.
    model = GOLDEN["reflection-llama-3.1-70b"]
    layout, source = layout_of(model, tmp_path, vocab_size=128262)
    with pytest.raises(TensorMismatchError) as caught:
        plan_to_native(layout, source.metas, model.name)
    assert caught.value.problems == (
        "model.embed_tokens.weight: [128256, 8192], expected [128262, 8192]",
        "lm_head.weight: [128256, 8192], expected [128262, 8192]",
    )
