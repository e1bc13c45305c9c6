"""Every family computes what transformers computes, and its files come back as they were."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from checkpointing import (
    AdapterConfig,
    FullModelHFCheckpointer,
    FullModelTorchTuneCheckpointer,
    MergedStateDict,
)
from checkpointing.families import FAMILIES
from checkpointing.training import add_adapter, build_decoder
from checkpointing.training.lora import load_adapter
from tests.families.variants import IN_FP64, VARIANTS, compared, random_model, tokens, write
from tests.families.weights_only import WEIGHTS_ONLY
from tests.tiny import (
    ATTENTION,
    EXPERTS,
    MLP,
    assert_same_tensors,
    random_adapter,
    targets_of,
)

ADAPTERS = {
    "lora on all": AdapterConfig(4, 6, (*ATTENTION, *MLP, *EXPERTS)),
    "dora on all": AdapterConfig(4, 6, (*ATTENTION, *MLP), use_dora=True),
    "rslora with patterns on q and k": AdapterConfig(
        4,
        6,
        ("q_proj", "k_proj"),
        use_rslora=True,
        rank_pattern={"layers.1.attn.k_proj": 3},
        alpha_pattern={"layers.2.attn.q_proj": 11},
    ),
}


def test_every_family_has_a_variant_here():
    assert {model_type for model_type, _ in VARIANTS.values()} == set(FAMILIES) - WEIGHTS_ONLY


@pytest.mark.parametrize("name", VARIANTS)
def test_native_logits_are_those_of_transformers(tmp_path, name):
    model = write(name, tmp_path)
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    native = build_decoder(checkpointer.model_config, weights, torch.float64).eval()
    with torch.no_grad():
        expected = model.double()(tokens()).logits
        assert expected.std() > 0.1
        assert compared(native(tokens()), expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_to_native_and_back_keeps_every_bit_and_every_key(tmp_path, name):
    model = write(name, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    saved = checkpointer.save_checkpoint({"model": weights}, epoch=0)
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert_same_tensors(load_file(saved / "model-00001-of-00001.safetensors"), before)
    again, report = type(model).from_pretrained(saved, output_loading_info=True, **IN_FP64)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_native_format_holds_the_same_model(tmp_path, name):
    write(name, tmp_path / "base")
    hf = FullModelHFCheckpointer(tmp_path / "base")
    weights = hf.load_checkpoint()["model"]
    (tmp_path / "native").mkdir()
    torch.save(weights, tmp_path / "native" / "model.bin")
    config = (tmp_path / "base" / "config.json").read_text()
    (tmp_path / "native" / "config.json").write_text(config)
    tune = FullModelTorchTuneCheckpointer(tmp_path / "native")
    assert tune.model_config == hf.model_config
    assert_same_tensors(tune.load_checkpoint()["model"], weights)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_adapter_and_merged_model_compute_the_same_in_peft(tmp_path, name, kind):
    model, adapter_config = write(name, tmp_path / "base"), ADAPTERS[kind]
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    dims = checkpointer.model_config.dims
    targets = targets_of(dims, adapter_config.target_modules)
    if adapter_config.use_dora:
        targets = tuple(target for target in targets if target not in EXPERTS)
    if dims.experts:
        # Dense layers beside those with experts: PEFT leaves them out, and we say so.
        targets = tuple(target for target in targets if target not in MLP)
    adapter_config = replace(adapter_config, target_modules=targets)
    adapter = random_adapter(dims, adapter_config)
    state = {
        "model": MergedStateDict(weights, adapter, adapter_config),
        "adapter": adapter,
        "adapter_config": adapter_config.to_state(),
    }
    saved = checkpointer.save_checkpoint(state, epoch=0)
    native = build_decoder(checkpointer.model_config, weights, torch.float64)
    add_adapter(native, adapter_config)
    load_adapter(native, adapter)
    with torch.no_grad():
        base = model.double()(tokens()).logits
        expected = native.double().eval()(tokens())
        assert compared(expected, base).abs().max() > 0.05
        merged = type(model).from_pretrained(saved / "merged", **IN_FP64).double()
        assert compared(expected, merged(tokens()).logits).abs().max() < 1e-5
        adapted = PeftModel.from_pretrained(model, saved)
        assert compared(expected, adapted(tokens()).logits).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in WEIGHTS_ONLY])
def test_a_config_with_sizes_alone_means_what_transformers_takes_for_the_rest(tmp_path, model_type):
    sizes = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 56,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
    }
    if model_type == "qwen3_moe":
        sizes["moe_intermediate_size"] = 24
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = random_model(model_type, {**sizes, **special})
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    native = build_decoder(checkpointer.model_config, weights, torch.float64)
    with torch.no_grad():
        expected = model.double().eval()(tokens()).logits
        assert compared(native(tokens()), expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_types_of_layers_that_a_config_leaves_out_are_those_that_transformers_derives(
    tmp_path, name
):
    write(name, tmp_path)
    expected = FullModelHFCheckpointer(tmp_path).model_config
    raw = json.loads((tmp_path / "config.json").read_text())
    # transformers writes them out when it saves; a config from elsewhere may lack them.
    raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert FullModelHFCheckpointer(tmp_path).model_config == expected


def test_gelu_in_a_config_of_gemma_means_the_approximation_as_transformers_takes_it(tmp_path):
    model = write("gemma", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "hidden_act": "gelu"}))
    assert type(model).from_pretrained(tmp_path).config.hidden_act == "gelu_pytorch_tanh"
    assert FullModelHFCheckpointer(tmp_path).model_config.activation == "gelu_tanh"
