import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from checkpointing import FullModelHFCheckpointer, ModelConfig
from checkpointing.mapping.rope_scaling import Llama3RopeScaling
from tests.tiny import assert_same_tensors, random_native, write_hf
from tests.training.peers import config, hf_model, native_weights, tokens

CONFIGS = {
    "llama": config(),
    "llama-biases": config(attention_bias=True, mlp_bias=True),
    "llama-tied": config(tied=True),
    "llama3-rope": config(
        rope_theta=500000.0, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64), max_seq_len=1024
    ),
    "mistral": config(family="mistral", sliding_window=9),
}
CONFIG = CONFIGS["llama"]


def load(directory, **options):
    return FullModelHFCheckpointer(directory, **options).load_checkpoint()["model"]


def read_all(directory, index="model.safetensors.index.json"):
    """The tensors of a saved directory, read with the libraries that wrote the formats."""
    files = set(json.loads((directory / index).read_text())["weight_map"].values())
    tensors = {}
    for file in files:
        path = directory / file
        tensors.update(load_file(path) if path.suffix == ".safetensors" else torch.load(path))
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_transformers_loads_and_is_saved_again_bit_for_bit(tmp_path, name, dtype):
    model = hf_model(CONFIGS[name]).to(dtype)
    base = write_hf(model, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    assert_same_tensors(weights, native_weights(model, CONFIGS[name]))
    assert checkpointer.model_config == CONFIGS[name]

    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    assert_same_tensors(read_all(saved), load_file(base / "model.safetensors"))
    again, report = type(model).from_pretrained(saved, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert again.dtype == dtype
    before = type(model).from_pretrained(base)
    assert torch.equal(again(tokens()).logits, before(tokens()).logits)


@pytest.mark.parametrize("files", ["found", "listed", "formatted"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_load_however_they_are_named_and_in_any_order(tmp_path, kind, files):
    model = hf_model(CONFIG)
    if kind == "safetensors":
        base = write_hf(model, tmp_path / "base", max_shard_size="40KB")
        names = sorted(path.name for path in base.glob("*.safetensors"))
    else:
        base = tmp_path / "base"
        base.mkdir()
        model.config.save_pretrained(base)
        names = [f"pytorch_model-{i:05d}-of-00003.bin" for i in (1, 2, 3)]
        items = list(model.state_dict().items())
        parts = dict(zip(names, (items[:7], items[7:19], items[19:]), strict=True))
        for file, part in parts.items():
            torch.save(dict(part), base / file)
        index = {key: file for file, part in parts.items() for key, _ in part}
        (base / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert len(names) > 2
    random.Random(4).shuffle(names)
    last = f"{len(names):05d}"
    prefix = "model" if kind == "safetensors" else "pytorch_model"
    options = {
        "found": None,
        "listed": names,
        "formatted": {"filename_format": f"{prefix}-{{}}-of-{{}}.{kind}", "max_filename": last},
    }
    weights = load(base, checkpoint_files=options[files])
    assert_same_tensors(weights, native_weights(model, CONFIG))


def test_a_single_bin_file_loads(tmp_path):
    model = hf_model(CONFIG)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_tensors(load(tmp_path), native_weights(model, CONFIG))


def test_a_bin_file_from_before_torch_1_6_loads(tmp_path):
    model = hf_model(CONFIG)
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    assert_same_tensors(load(tmp_path), native_weights(model, CONFIG))


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_max_shard_size_holds_and_transformers_reads_the_shards(tmp_path, safe):
    model = hf_model(CONFIG)
    base = write_hf(model, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(
        base, output_dir=tmp_path / "out", safe_serialization=safe, max_shard_size="60KB"
    )
    state = checkpointer.load_checkpoint()
    saved = checkpointer.save_checkpoint(state, epoch=2)
    assert saved == tmp_path / "out" / "epoch_2"
    suffix = "safetensors" if safe else "bin"
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    files = sorted(path.name for path in saved.glob(f"*.{suffix}"))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.{suffix}" for i in range(1, 1 + len(files))
    ]
    content = [load_file(saved / f) if safe else torch.load(saved / f) for f in files]
    assert len(files) > 3
    assert all(sum(t.nbytes for t in part.values()) <= 60_000 for part in content)
    total = sum(tensor.nbytes for part in content for tensor in part.values())
    assert json.loads((saved / index).read_text())["metadata"]["total_size"] == total
    assert_same_tensors(read_all(saved, index), model.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert_same_tensors(load(saved), native_weights(model, CONFIG))


def test_a_size_given_to_save_checkpoint_goes_before_the_constructors(tmp_path):
    base = write_hf(hf_model(CONFIG), tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out", max_shard_size="60KB")
    saved = checkpointer.save_checkpoint(checkpointer.load_checkpoint(), 0, max_shard_size="1GB")
    assert len(list(saved.glob("*.safetensors"))) == 1


def test_three_fields_and_a_model_type_are_enough_of_a_config(tmp_path):
    # The rest is read off the tensors; such directories are in use with torchtune.
    model = hf_model(config(hidden=84, heads=6))
    cfg = config(hidden=84, heads=6)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    three = {"hidden_size": 84, "num_attention_heads": 6, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(three))
    checkpointer = FullModelHFCheckpointer(tmp_path, model_type="LLAMA3", output_dir=None)
    assert_same_tensors(checkpointer.load_checkpoint()["model"], native_weights(model, cfg))
    assert checkpointer.model_config.dims == cfg.dims


def test_the_same_with_tied_embeddings(tmp_path):
    cfg = config(hidden=84, heads=6, tied=True)
    model = hf_model(cfg)
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    three = {"hidden_size": 84, "num_attention_heads": 6, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(three))
    checkpointer = FullModelHFCheckpointer(tmp_path, model_type="LLAMA3_2")
    assert checkpointer.model_config.dims.tied
    assert_same_tensors(checkpointer.load_checkpoint()["model"], native_weights(model, cfg))


@pytest.mark.parametrize("peer", [LlamaConfig, MistralConfig])
def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(tmp_path, peer):
    # Only sizes are given; every other field must come out as transformers' own default.
    sizes = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
    }
    defaults = peer(**sizes)
    model = AutoModelForCausalLM.from_config(defaults)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": peer.model_type, **sizes}))
    found: ModelConfig = FullModelHFCheckpointer(tmp_path).model_config
    assert found.dims.kv_heads == defaults.num_key_value_heads
    assert found.dims.head_dim == defaults.head_dim
    assert found.dims.tied == defaults.tie_word_embeddings
    assert found.dims.attention_bias == getattr(defaults, "attention_bias", False)
    assert found.dims.mlp_bias == getattr(defaults, "mlp_bias", False)
    assert found.norm_eps == defaults.rms_norm_eps
    assert found.rope_theta == defaults.rope_parameters["rope_theta"]
    assert found.max_seq_len == defaults.max_position_embeddings
    assert found.sliding_window == getattr(defaults, "sliding_window", None)


def test_a_config_that_transformers_4_wrote_says_the_same(tmp_path):
    cfg = CONFIGS["llama3-rope"]
    base = write_hf(hf_model(cfg), tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope
    raw["torch_dtype"] = raw.pop("dtype")
    (base / "config.json").write_text(json.dumps(raw))
    assert FullModelHFCheckpointer(base).model_config == cfg


def test_a_rope_that_the_decoder_lacks_still_converts(tmp_path):
    base = write_hf(hf_model(CONFIG), tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 4.0}
    (base / "config.json").write_text(json.dumps(raw))
    checkpointer = FullModelHFCheckpointer(base)
    assert checkpointer.model_config.unsupported == ("rope_type 'spiral'",)
    assert set(checkpointer.load_checkpoint()["model"]) == set(random_native(CONFIG))


def test_a_head_of_its_own_is_kept_though_the_config_says_tied(tmp_path, caplog):
    cfg = config()
    model = hf_model(cfg)
    base = write_hf(model, tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    raw["tie_word_embeddings"] = True
    (base / "config.json").write_text(json.dumps(raw))
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    assert torch.equal(weights["output.weight"], model.state_dict()["lm_head.weight"])
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text

    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_a_head_that_training_untied_is_kept(tmp_path):
    cfg = config(tied=True)
    base = write_hf(hf_model(cfg), tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    weights["output.weight"] = weights["tok_embeddings.weight"] + 1
    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    assert torch.equal(read_all(saved)["lm_head.weight"], weights["output.weight"])
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_is_a_copy_of_the_embedding_is_not_one_of_its_own(tmp_path):
    cfg = config(tied=True)
    model = hf_model(cfg)
    base = write_hf(model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert_same_tensors(load(base), native_weights(model, cfg))


def test_the_saved_config_names_the_dtype_that_the_weights_have(tmp_path):
    # transformers 5 loads in the dtype that config.json names: fp32 weights would be rounded.
    model = hf_model(CONFIG).bfloat16()
    base = write_hf(model, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    trained = {n: t.float() + 1e-4 for n, t in checkpointer.load_checkpoint()["model"].items()}
    saved = checkpointer.save_checkpoint({"model": trained}, epoch=0)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.state_dict()["model.norm.weight"], trained["norm.scale"])


def test_side_files_travel_with_the_weights_and_other_weights_do_not(tmp_path):
    base = write_hf(hf_model(CONFIG), tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    (base / "LICENSE").write_text("free")
    (base / "README.md").write_text("a card that speaks of the base")
    (base / "model.gguf").write_text("other weights")
    (base / "consolidated.00.pth").write_text("other weights")
    (base / "original").mkdir()
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    saved = checkpointer.save_checkpoint(checkpointer.load_checkpoint(), epoch=0)
    assert {path.name for path in saved.iterdir()} == {
        "LICENSE",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
