"""The PEFT adapter that is written, loaded by PEFT itself."""

import itertools
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.training import add_adapter, build_decoder
from checkpointing.training.lora import load_adapter
from tests.tiny import ATTENTION, MLP, random_adapter, write_hf
from tests.training.peers import config, hf_model, tokens

CONFIGS = {
    "llama": config(),
    "llama-biases": config(attention_bias=True, mlp_bias=True),
    "llama-tied": config(tied=True),
    "mistral": config(family="mistral", sliding_window=9),
}
QUERY, DOWN = "layers.1.attn.q_proj", "layers.2.mlp.w2"
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rsdora": {"use_dora": True, "use_rslora": True},
    "patterns": {"rank_pattern": {QUERY: 7, DOWN: 2}, "alpha_pattern": {DOWN: 11}},
    "patterns-dora": {
        "rank_pattern": {QUERY: 7},
        "alpha_pattern": {DOWN: 11},
        "use_dora": True,
    },
}
TARGETS = {
    "q": ("q_proj",),
    "q-v-w2": ("q_proj", "v_proj", "w2"),
    "attention": ATTENTION,
    "all": (*ATTENTION, *MLP),
    "all-output": (*ATTENTION, *MLP, "output"),
}


def saved(tmp_path, model_config, adapter_config, adapter=None):
    """A base, an adapter for it and the checkpoint of both; the checkpoint's directory."""
    model = hf_model(model_config)
    base = write_hf(model, tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    weights = checkpointer.load_checkpoint()["model"]
    adapter = adapter or random_adapter(model_config.dims, adapter_config)
    directory = checkpointer.save_checkpoint(
        {
            "model": MergedStateDict(weights, adapter, adapter_config),
            "adapter": adapter,
            "adapter_config": adapter_config.to_state(),
        },
        epoch=0,
    )
    native = build_decoder(checkpointer.model_config, weights, torch.float32)
    add_adapter(native, adapter_config)
    load_adapter(native, adapter)
    return model, native.eval(), directory


def has_all_modules(name, kind, targets):
    """An output projection only where it is not tied, a pattern only for modules that are there."""
    patterns = [key for value in KINDS[kind].values() if isinstance(value, dict) for key in value]
    lacking = {key.rsplit(".", 1)[-1] for key in patterns} - set(TARGETS[targets])
    return not lacking and not ("output" in TARGETS[targets] and CONFIGS[name].dims.tied)


CASES = [case for case in itertools.product(CONFIGS, KINDS, TARGETS) if has_all_modules(*case)]


@pytest.mark.parametrize(("name", "kind", "targets"), CASES)
def test_peft_and_the_merged_model_compute_what_the_native_model_computes(
    tmp_path, name, kind, targets
):
    adapter_config = AdapterConfig(4, 6, TARGETS[targets], **KINDS[kind])
    model, native, directory = saved(tmp_path, CONFIGS[name], adapter_config)
    ids = tokens()
    base_logits = model(ids).logits
    # In fp64, so that the figure is the error and not the noise of random weights.
    expected = native.double()(ids)
    peft = PeftModel.from_pretrained(model, directory).double()
    merged = type(model).from_pretrained(directory / "merged").double()
    assert (expected - base_logits).abs().max() > 0.1
    assert (peft(ids).logits - expected).abs().max() < 1e-5
    assert (merged(ids).logits - expected).abs().max() < 1e-5


def test_an_adapter_directory_holds_no_model_config_or_transformers_would_add_it_twice(tmp_path):
    from transformers import AutoModelForCausalLM

    _, native, directory = saved(tmp_path, CONFIGS["llama"], AdapterConfig(4, 6, ATTENTION))
    assert not (directory / "config.json").exists()
    assert (directory / "merged" / "config.json").exists()
    expected = native.double()(tokens())
    for path in (directory, directory / "merged"):
        loaded = AutoModelForCausalLM.from_pretrained(path).double()
        assert (loaded(tokens()).logits - expected).abs().max() < 1e-5


def test_auto_peft_finds_the_base_by_itself(tmp_path):
    from peft import AutoPeftModelForCausalLM

    _, native, directory = saved(tmp_path, CONFIGS["llama"], AdapterConfig(4, 6, ATTENTION))
    loaded = AutoPeftModelForCausalLM.from_pretrained(directory).double()
    assert (loaded(tokens()).logits - native.double()(tokens())).abs().max() < 1e-5


def written(directory):
    return (
        load_file(directory / "adapter_model.safetensors"),
        json.loads((directory / "adapter_config.json").read_text()),
    )


def test_the_config_says_all_that_engines_read(tmp_path):
    adapter_config = AdapterConfig(4, 6, (*ATTENTION, *MLP), dropout=0.05)
    _, _, directory = saved(tmp_path, CONFIGS["llama"], adapter_config)
    tensors, peft_config = written(directory)
    assert peft_config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tmp_path / "base"),
        "r": 4,
        "lora_alpha": 6,
        "target_modules": [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "down_proj",
            "up_proj",
        ],
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "lora_bias": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
    }
    prefix = "base_model.model.model.layers.2.self_attn.q_proj"
    assert tensors[f"{prefix}.lora_A.weight"].shape == (4, 42)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (84, 4)
    assert len(tensors) == 2 * 7 * 3


def test_the_base_is_named_by_its_repository_where_the_download_noted_it(tmp_path):
    base = write_hf(hf_model(CONFIGS["llama"]), tmp_path / "base")
    (base / "original_repo_id.json").write_text('{"repo_id": "someone/model"}')
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    adapter_config = AdapterConfig(4, 6, ATTENTION)
    adapter = random_adapter(CONFIGS["llama"].dims, adapter_config)
    state = {"adapter": adapter, "adapter_config": adapter_config.to_state()}
    directory = checkpointer.save_checkpoint(state, 0, adapter_only=True)
    assert written(directory)[1]["base_model_name_or_path"] == "someone/model"


def test_a_group_that_engines_fuse_is_written_whole_with_zeros_for_the_rest(tmp_path):
    _, _, directory = saved(tmp_path, CONFIGS["llama"], AdapterConfig(4, 6, ("q_proj", "w3")))
    tensors, peft_config = written(directory)
    assert peft_config["target_modules"] == ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    layer = "base_model.model.model.layers.0."
    assert tensors[f"{layer}self_attn.v_proj.lora_B.weight"].shape == (28, 4)
    for module in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
        assert not tensors[f"{layer}{module}.lora_A.weight"].any()
        assert not tensors[f"{layer}{module}.lora_B.weight"].any()


def test_ranks_are_padded_to_one_and_scales_are_folded_into_b(tmp_path):
    adapter_config = AdapterConfig(
        4, 6, ("q_proj", "w2"), use_rslora=True, rank_pattern={QUERY: 7}, alpha_pattern={DOWN: 11}
    )
    adapter = random_adapter(CONFIGS["llama"].dims, adapter_config)
    _, _, directory = saved(tmp_path, CONFIGS["llama"], adapter_config, adapter)
    tensors, peft_config = written(directory)
    assert (peft_config["r"], peft_config["lora_alpha"]) == (7, 6)
    foreign = "base_model.model.model.layers.2.mlp.down_proj"
    a, b = tensors[f"{foreign}.lora_A.weight"], tensors[f"{foreign}.lora_B.weight"]
    assert a.shape == (7, 56) and not a[4:].any() and not b[:, 4:].any()
    # alpha / sqrt(r) of the module, 11 / 2, against the written 6 / 7.
    expected = adapter[f"{DOWN}.lora_b.weight"] * (11 / 2) / (6 / 7)
    torch.testing.assert_close(b[:, :4], expected)


@pytest.mark.parametrize(
    ("rank", "dtype"), [(4, torch.bfloat16), (16, torch.bfloat16), (8, torch.float32)]
)
def test_b_keeps_its_dtype_only_where_folding_the_scale_rounds_nothing(tmp_path, rank, dtype):
    # rsLoRA multiplies with sqrt(r): a power of two for 4 and 16, which bf16 holds exactly.
    adapter_config = AdapterConfig(rank, 8, ATTENTION, use_rslora=True)
    adapter = random_adapter(CONFIGS["llama"].dims, adapter_config, dtype=torch.bfloat16)
    _, _, directory = saved(tmp_path, CONFIGS["llama"], adapter_config, adapter)
    b = written(directory)[0]["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"]
    assert b.dtype == dtype
    exact = adapter["layers.0.attn.v_proj.lora_b.weight"].double() * rank**0.5
    torch.testing.assert_close(b.double(), exact, rtol=0 if rank != 8 else 1e-7, atol=0)


def test_an_adapter_on_some_layers_names_just_these_modules(tmp_path):
    adapter_config = AdapterConfig(4, 6, ATTENTION)
    adapter = random_adapter(CONFIGS["llama"].dims, adapter_config)
    adapter = {name: tensor for name, tensor in adapter.items() if "layers.1." not in name}
    base = write_hf(hf_model(CONFIGS["llama"]), tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    state = {"adapter": adapter, "adapter_config": adapter_config.to_state()}
    directory = checkpointer.save_checkpoint(state, 0, adapter_only=True)
    targets = written(directory)[1]["target_modules"]
    assert "model.layers.0.self_attn.q_proj" in targets
    assert not any("layers.1." in target for target in targets) and "q_proj" not in targets
    loaded = PeftModel.from_pretrained(hf_model(CONFIGS["llama"]), directory)
    wrapped = {name.split(".lora_A")[0] for name, _ in loaded.named_modules() if ".lora_A" in name}
    assert len(wrapped) == 2 * 4


def test_dora_is_written_as_peft_has_it(tmp_path):
    adapter_config = AdapterConfig(4, 6, ("q_proj",), use_dora=True)
    _, _, directory = saved(tmp_path, CONFIGS["llama"], adapter_config)
    tensors, peft_config = written(directory)
    assert peft_config["use_dora"] is True and peft_config["target_modules"] == ["q_proj"]
    vector = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    assert tensors[vector].shape == (84,)


def test_torchtunes_adapter_config_does_not_hide_that_the_adapter_is_dora(tmp_path):
    base = write_hf(hf_model(CONFIGS["llama"]), tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "out")
    dora = AdapterConfig(4, 6, ("q_proj",), use_dora=True)
    four = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "peft_type": "LORA"}
    state = {"adapter": random_adapter(CONFIGS["llama"].dims, dora), "adapter_config": four}
    directory = checkpointer.save_checkpoint(state, 0, adapter_only=True)
    assert written(directory)[1]["use_dora"] is True


def test_a_bin_adapter_is_written_where_safetensors_are_not_wanted(tmp_path):
    base = write_hf(hf_model(CONFIGS["llama"]), tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(
        base, output_dir=tmp_path / "out", safe_serialization=False
    )
    adapter_config = AdapterConfig(4, 6, ATTENTION)
    adapter = random_adapter(CONFIGS["llama"].dims, adapter_config)
    state = {"adapter": adapter, "adapter_config": adapter_config.to_state()}
    directory = checkpointer.save_checkpoint(state, 0, adapter_only=True)
    assert not (directory / "adapter_model.safetensors").exists()
    loaded = PeftModel.from_pretrained(hf_model(CONFIGS["llama"]), directory)
    b = loaded.state_dict()[
        "base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight"
    ]
    assert torch.equal(b, adapter["layers.0.attn.v_proj.lora_b.weight"])
