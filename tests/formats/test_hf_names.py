import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from checkpointing import FullModelHFCheckpointer
from checkpointing.errors import ConfigError, TensorMismatchError
from tests.families.variants import random_model, write
from tests.tiny import assert_same_tensors, write_hf
from tests.training.peers import config, hf_model, native_weights, tokens

SMALL = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
}
UNTIED, TIED = config(), config(tied=True)
MODEL = "model."

# What stands before the decoder's names and before the head's, instead of "model." and nothing.
PREFIXES = {
    "a model in another": ("model.model.", "model."),
    "a decoder in another, the head beside it": ("model.model.", ""),
    "torch.compile": ("_orig_mod.model.", "_orig_mod."),
    "torch.compile of the decoder": ("model._orig_mod.", ""),
    "DataParallel": ("module.model.", "module."),
    "both": ("module._orig_mod.model.", "module._orig_mod."),
    "the decoder's bare names": ("", ""),
}


def with_prefixes(tensors, base, head):
    return {
        base + name.removeprefix(MODEL) if name.startswith(MODEL) else head + name: tensor
        for name, tensor in tensors.items()
    }


def rename(directory, base, head):
    """Gives the tensors of a directory other prefixes; returns them under the old names."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(with_prefixes(tensors, base, head), path, {"format": "pt"})
    return tensors


@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("cfg", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_prefix_of_all_names_is_read_and_not_saved(tmp_path, caplog, cfg, prefixes):
    model = hf_model(cfg)
    base = write_hf(model, tmp_path / "base")
    tensors = rename(base, *PREFIXES[prefixes])
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    with caplog.at_level(logging.INFO):
        weights = checkpointer.load_checkpoint()["model"]
    assert_same_tensors(weights, native_weights(model, cfg))
    (said,) = [record.message for record in caplog.records if "is read as" in record.message]
    decoder, head = PREFIXES[prefixes]
    renamed = [(decoder + "embed_tokens.weight", "model.embed_tokens.weight")]
    if head:
        renamed.append((head + "lm_head.weight", "lm_head.weight"))
    assert any(said.startswith(f"{base}: {old} is read as {new}, ") for old, new in renamed)

    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    assert_same_tensors(load_file(saved / "model-00001-of-00001.safetensors"), tensors)
    again, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def wrapped_decoder(model):
    model.model = torch.compile(model.model)
    return model


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel, wrapped_decoder])
def test_the_state_dict_of_a_wrapped_model_loads(tmp_path, wrap):
    model = hf_model(UNTIED)
    model.config.save_pretrained(tmp_path)
    expected = native_weights(model, UNTIED)
    torch.save(wrap(model).state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_tensors(FullModelHFCheckpointer(tmp_path).load_checkpoint()["model"], expected)


def test_names_as_transformers_writes_them_are_not_spoken_of(tmp_path, caplog):
    base = write_hf(hf_model(UNTIED), tmp_path / "base")
    with caplog.at_level(logging.INFO):
        FullModelHFCheckpointer(base).load_checkpoint()
    assert "is read as" not in caplog.text


@pytest.mark.parametrize("name", ["phi3", "gemma2", "olmo2", "qwen3"])
def test_prefixes_are_read_in_every_family(tmp_path, name):
    model = write(name, tmp_path / "base")
    expected = FullModelHFCheckpointer(tmp_path / "base").load_checkpoint()["model"]
    copy = write_hf(model, tmp_path / "copy")
    rename(copy, "_orig_mod.model.", "_orig_mod.")
    assert_same_tensors(FullModelHFCheckpointer(copy).load_checkpoint()["model"], expected)


def test_shards_with_a_prefix_agree_with_their_index(tmp_path):
    model = hf_model(UNTIED)
    base = tmp_path / "base"
    base.mkdir()
    model.config.save_pretrained(base)
    items = list(with_prefixes(model.state_dict(), "module.model.", "module.").items())
    parts = {"model-1.safetensors": dict(items[:9]), "model-2.safetensors": dict(items[9:])}
    for file, part in parts.items():
        save_file(part, base / file)
    index = {name: file for file, part in parts.items() for name in part}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = FullModelHFCheckpointer(base).load_checkpoint()["model"]
    assert_same_tensors(weights, native_weights(model, UNTIED))


def test_the_tables_of_rope_under_a_prefix_are_dropped_too(tmp_path):
    model = hf_model(UNTIED)
    base = write_hf(model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(7)
    save_file(with_prefixes(tensors, "_orig_mod.model.", "_orig_mod."), base / "model.safetensors")
    weights = FullModelHFCheckpointer(base).load_checkpoint()["model"]
    assert_same_tensors(weights, native_weights(model, UNTIED))


def test_a_tied_model_that_was_saved_without_its_head_loads(tmp_path):
    model = hf_model(TIED)
    base = write_hf(model.model, tmp_path / "base")
    assert "embed_tokens.weight" in load_file(base / "model.safetensors")
    weights = FullModelHFCheckpointer(base).load_checkpoint()["model"]
    assert_same_tensors(weights, native_weights(model, TIED))


@pytest.mark.parametrize("config_says", [False, None])
def test_an_untied_model_that_was_saved_without_its_head_is_refused(tmp_path, config_says):
    # A config that says nothing means that it is untied, to transformers.
    base = write_hf(hf_model(UNTIED).model, tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": config_says}))
    with pytest.raises(TensorMismatchError) as caught:
        FullModelHFCheckpointer(base).load_checkpoint()
    dims = UNTIED.dims
    missing = f"lm_head.weight: missing, expected [{dims.vocab}, {dims.hidden}]"
    assert caught.value.problems == (missing,)
    assert "saved by itself, without its head: save the whole model" in str(caught.value)


def test_with_the_head_all_other_problems_of_a_bare_model_are_told(tmp_path):
    base = write_hf(hf_model(UNTIED).model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(TensorMismatchError) as caught:
        FullModelHFCheckpointer(base).load_checkpoint()
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_tensors_of_two_prefixes_are_refused_by_name(tmp_path):
    base = write_hf(hf_model(UNTIED), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(TensorMismatchError) as caught:
        FullModelHFCheckpointer(base).load_checkpoint()
    assert "norm.weight: the prefix is ''" in caught.value.problems
    assert any(
        problem.endswith("more: the prefix is 'model.'") for problem in caught.value.problems
    )
    assert "save the model anew" in str(caught.value)


@pytest.mark.parametrize("twice", ["_orig_mod.model.norm.weight", "norm.weight"])
def test_a_tensor_that_is_there_twice_is_refused(tmp_path, twice):
    base = write_hf(hf_model(UNTIED), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors[twice] = tensors["model.norm.weight"].clone()
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(TensorMismatchError, match="or some are there twice") as caught:
        FullModelHFCheckpointer(base).load_checkpoint()
    assert f"{twice}: the prefix is {twice.removesuffix('norm.weight')!r}" in caught.value.problems


def test_a_head_of_another_wrapper_than_its_decoder_is_refused(tmp_path):
    base = write_hf(hf_model(UNTIED), tmp_path / "base")
    rename(base, "_orig_mod.model.", "module.")
    with pytest.raises(TensorMismatchError, match=r"lm_head.weight: the prefix is 'module\.'"):
        FullModelHFCheckpointer(base).load_checkpoint()


def test_consolidated_duplicates_are_neither_read_nor_copied(tmp_path):
    # As mistralai/Mistral-7B-Instruct-v0.3 ships them: shards with an index, and the same once more
    # in one file under Mistral's names; meta-llama's repositories have .pth files.
    cfg = config(family="mistral", sliding_window=9)
    model = hf_model(cfg)
    base = write_hf(model, tmp_path / "base", max_shard_size="40KB")
    other = {"layers.0.attention.wq.weight": torch.full((84, 42), 7.0)}
    save_file(other, base / "consolidated.safetensors")
    save_file(other, base / "consolidated-00001-of-00001.safetensors")
    (base / "consolidated.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(other, "consolidated.safetensors")})
    )
    torch.save(other, base / "consolidated.00.pth")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    assert_same_tensors(weights, native_weights(model, cfg))
    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    assert not [path.name for path in saved.rglob("*consolidated*")]


def test_one_file_without_an_index_goes_before_consolidated_ones(tmp_path):
    model = hf_model(UNTIED)
    base = write_hf(model, tmp_path / "base")
    save_file({"norm.weight": torch.ones(42)}, base / "consolidated.safetensors")
    weights = FullModelHFCheckpointer(base).load_checkpoint()["model"]
    assert_same_tensors(weights, native_weights(model, UNTIED))


@pytest.fixture
def multimodal(tmp_path):
    """A Llama that sees, on disk."""
    torch.manual_seed(7)
    vision = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=28,
        patch_size=14,
    )
    text = LlamaConfig(**SMALL, num_hidden_layers=3)
    whole = LlavaConfig(text_config=text, vision_config=vision, image_token_index=130)
    return write_hf(LlavaForConditionalGeneration(whole), tmp_path / "base")


def test_a_multimodal_model_is_refused_with_a_remedy_that_helps(tmp_path, multimodal):
    with pytest.raises(ConfigError) as caught:
        FullModelHFCheckpointer(multimodal).load_checkpoint()
    said = str(caught.value)
    assert f"{multimodal / 'config.json'}: model_type 'llava' is a multimodal model" in said
    assert "(text_config, vision_config)" in said
    assert "save its text model, which is a llama, by itself" in said

    # What the error says to do.
    whole = AutoModelForImageTextToText.from_pretrained(multimodal)
    text = AutoModelForCausalLM.from_config(whole.config.text_config)
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    base = write_hf(text, tmp_path / "text")
    weights = FullModelHFCheckpointer(base).load_checkpoint()["model"]
    embedding = whole.model.language_model.embed_tokens.weight
    assert torch.equal(weights["tok_embeddings.weight"], embedding)


def test_a_multimodal_model_whose_text_model_is_unknown_too_is_refused(tmp_path):
    raw = {"model_type": "llava", "text_config": {"model_type": "opt"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"any": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'llava' is a multimodal model.*supported are .*llama"):
        FullModelHFCheckpointer(tmp_path).load_checkpoint()


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_multimodal_tensors_beside_the_config_of_a_text_model_are_refused(tmp_path, prefix):
    model = random_model("llama", {**SMALL, "num_hidden_layers": 1})
    base = write_hf(model, tmp_path / "base")
    tensors = rename(base, "", "")
    inside = {prefix + name: tensor for name, tensor in tensors.items()}
    inside["vision_tower.patch_embedding.weight"] = torch.ones(3)
    save_file(inside, base / "model.safetensors")
    with pytest.raises(TensorMismatchError) as caught:
        FullModelHFCheckpointer(base).load_checkpoint()
    (problem,) = caught.value.problems
    assert problem.endswith(f"and {len(inside) - 1} more: of a multimodal model")
    assert "text-only release" in str(caught.value)
