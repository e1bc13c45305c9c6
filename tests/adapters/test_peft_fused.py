"""Adapters on foreign modules that are fused of several native ones."""

import json

import pytest
import torch
from safetensors.torch import load_file

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.errors import ConfigError
from tests.families.variants import write
from tests.tiny import ATTENTION, MLP, random_adapter

# Phi-3 with 6 heads and 2 key-value heads of width 14: q is rows 0-83, k 84-111, v 112-139.
ROWS = {"q_proj": slice(0, 84), "k_proj": slice(84, 112), "v_proj": slice(112, 140)}


def save(tmp_path, adapter_config):
    write("phi3", tmp_path / "base")
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    adapter = random_adapter(checkpointer.model_config.dims, adapter_config)
    state = {"adapter": adapter, "adapter_config": adapter_config.to_state()}
    saved = checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)
    config = json.loads((saved / "adapter_config.json").read_text())
    return adapter, load_file(saved / "adapter_model.safetensors"), config


def test_a_is_stacked_and_b_is_block_diagonal(tmp_path):
    adapter, tensors, config = save(tmp_path, AdapterConfig(4, 6, (*ATTENTION, *MLP)))
    # Three parts of rank 4: rank and alpha grow together, so that alpha / r stays 6 / 4.
    assert (config["r"], config["lora_alpha"]) == (12, 18)
    assert config["target_modules"] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    prefix = "base_model.model.model.layers.1."
    a = tensors[prefix + "self_attn.qkv_proj.lora_A.weight"]
    b = tensors[prefix + "self_attn.qkv_proj.lora_B.weight"]
    assert (a.shape, b.shape) == ((12, 42), (140, 12))
    for number, (name, rows) in enumerate(ROWS.items()):
        ranks = slice(4 * number, 4 * number + 4)
        native = f"layers.1.attn.{name}"
        assert torch.equal(a[ranks], adapter[f"{native}.lora_a.weight"])
        assert torch.equal(b[rows, ranks], adapter[f"{native}.lora_b.weight"])
        b[rows, ranks] = 0
    assert not b.any()
    down = tensors[prefix + "mlp.down_proj.lora_A.weight"]
    assert torch.equal(down[:4], adapter["layers.1.mlp.w2.lora_a.weight"]) and not down[4:].any()


def test_a_part_without_an_adapter_is_zero(tmp_path):
    adapter, tensors, config = save(tmp_path, AdapterConfig(4, 6, ("q_proj", "v_proj")))
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 12, ["qkv_proj"])
    b = tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    assert torch.equal(b[ROWS["v_proj"], 4:], adapter["layers.0.attn.v_proj.lora_b.weight"])
    assert not b[ROWS["k_proj"]].any()


def test_dora_says_the_rank_and_alpha_of_fused_modules_in_patterns(tmp_path):
    adapter_config = AdapterConfig(4, 6, (*ATTENTION, *MLP), use_dora=True)
    adapter, tensors, config = save(tmp_path, adapter_config)
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert config["rank_pattern"] == {"qkv_proj": 12, "gate_up_proj": 8}
    assert config["alpha_pattern"] == {"qkv_proj": 18, "gate_up_proj": 12}
    name = "base_model.model.model.layers.0.mlp.gate_up_proj.lora_magnitude_vector"
    magnitudes = [adapter[f"layers.0.mlp.{part}.magnitude"] for part in ("w1", "w3")]
    assert torch.equal(tensors[name], torch.cat(magnitudes))


def test_dora_on_part_of_a_fused_module_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"self_attn\.qkv_proj: is fused .* must be on all"):
        save(tmp_path, AdapterConfig(4, 6, ("q_proj",), use_dora=True))
