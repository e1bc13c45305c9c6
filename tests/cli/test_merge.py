"""`tune merge` computes what PEFT computes, and tells what rounding left of the update."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.cli.main import main
from checkpointing.formats.detect import find_model
from checkpointing.mapping.tensors import StateDictSource
from checkpointing.merge import MeasuredMerge, by_kind
from tests.cli.test_convert import convert, weights, write_base
from tests.tiny import ATTENTION, EXPERTS, MLP, assert_same_tensors, random_adapter, write_hf
from tests.training.peers import config

MODEL = config()
ADAPTER = AdapterConfig(r=4, alpha=6.0, target_modules=(*ATTENTION, *MLP, "output"))
KINDS = {
    "LoRA": ADAPTER,
    "rsLoRA": replace(ADAPTER, use_rslora=True),
    "DoRA": replace(ADAPTER, use_dora=True),
    "patterns": replace(
        ADAPTER, rank_pattern={"layers.1.mlp.w2": 7}, alpha_pattern={"layers.2.attn.q_proj": 11.0}
    ),
}


def save_adapter(base: Path, out: Path, adapter_config: AdapterConfig) -> Path:
    """A checkpoint with an adapter and no merged model."""
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    state = {
        "adapter": random_adapter(MODEL.dims, adapter_config),
        "adapter_config": adapter_config.to_state(),
    }
    return checkpointer.save_checkpoint(state, epoch=2, adapter_only=True, step=17)


def merge(*arguments: Path | str) -> int:
    return main(["merge", *map(str, arguments)])


@pytest.mark.parametrize("adapter_config", KINDS.values(), ids=KINDS)
def test_the_merged_model_is_that_of_pefts_merge_and_unload(tmp_path, adapter_config):
    base = write_base(tmp_path / "base", MODEL)
    adapter = save_adapter(base, tmp_path / "run", adapter_config)
    assert merge(base, adapter, tmp_path / "out") == 0
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    expected = peft.merge_and_unload().state_dict()
    found = weights(tmp_path / "out")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found["lm_head.weight"], weights(base)["lm_head.weight"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_experts_are_merged_and_reported(tmp_path, capsys):
    settings = MixtralConfig(
        **{"vocab_size": 131, "hidden_size": 42, "intermediate_size": 56, "head_dim": 14},
        **{"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3},
        **{"num_local_experts": 5, "num_experts_per_tok": 4, "pad_token_id": 0},
    )
    base = write_hf(MixtralForCausalLM(settings), tmp_path / "base")
    found = find_model(base).open()
    adapter_config = replace(ADAPTER, target_modules=("q_proj", *EXPERTS))
    state = {
        "adapter": random_adapter(found.config.dims, adapter_config),
        "adapter_config": adapter_config.to_state(),
    }
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path / "run")
    adapter = checkpointer.save_checkpoint(state, epoch=0, adapter_only=True, step=1)
    assert merge(base, adapter, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "what rounding to float32 left" in printed
    for kind in (*EXPERTS, "q_proj"):
        assert re.search(rf"{kind} +2 ", printed), printed
    name = "layers.1.mlp.experts.up_proj"
    weight = find_model(tmp_path / "out").open().native.read(name)
    a, b = (state["adapter"][f"layers.1.mlp.experts.lora_up_{each}"] for each in "ab")
    torch.testing.assert_close(weight, found.native.read(name) + 1.5 * (a @ b))


@pytest.mark.parametrize("to", ["meta", "tune"])
def test_base_and_result_may_be_in_any_format(tmp_path, to):
    base = write_base(tmp_path / "base", MODEL, torch.bfloat16)
    adapter = save_adapter(base, tmp_path / "run", ADAPTER)
    assert convert(base, tmp_path / "other", to) == 0
    assert merge(base, adapter, tmp_path / "expected") == 0
    assert merge(tmp_path / "other", adapter, tmp_path / "merged") == 0
    assert convert(tmp_path / "merged", tmp_path / "back", "hf") == 0
    assert_same_tensors(weights(tmp_path / "back"), weights(tmp_path / "expected"))
    assert merge(base, adapter, tmp_path / "direct", "--to", to) == 0
    assert main(["diff", str(tmp_path / "direct"), str(tmp_path / "merged")]) == 0


def test_what_survives_rounding_is_as_calculated_by_hand():
    # bfloat16 has 8 significant bits: 1 + 2**-10 and 2 + 2**-10 fall back, halves are exact.
    weight = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 2.0]], dtype=torch.bfloat16)
    adapter = {
        "layers.0.attn.q_proj.lora_a.weight": torch.tensor([[2.0**-10, 0.5, 0.0]]),
        "layers.0.attn.q_proj.lora_b.weight": torch.ones(2, 1),
    }
    merged = MeasuredMerge(
        StateDictSource({"layers.0.attn.q_proj.weight": weight}),
        StateDictSource(adapter),
        AdapterConfig(r=1, alpha=1.0, target_modules=("q_proj",)),
    )
    stored = merged.read("layers.0.attn.q_proj.weight")
    assert stored.tolist() == [[1.0, 1.5, 1.0], [2.0, 0.5, 2.0]]
    count, survival = by_kind(merged.survival)["q_proj"]
    assert (count, survival.updated, survival.changed) == (1, 4, 2)
    assert survival.changed_share == 0.5
    update = 2 * 0.25 + 2 * 2.0**-20
    assert survival.kept_norm == pytest.approx((0.5 / update) ** 0.5, rel=1e-12)
    assert survival.lost_norm == pytest.approx((2 * 2.0**-20 / update) ** 0.5, rel=1e-12)
    assert survival.relative_update == pytest.approx((update / 11) ** 0.5, rel=1e-12)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("sampled", [1, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_measuring_changes_nothing_of_what_is_stored(dtype, sampled, use_dora):
    """Of every dtype: what is computed in fp64 has the dtype of an fp64 weight."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(70, 13, generator=generator, dtype=torch.float64).to(dtype)
    a = torch.randn(3, 13, generator=generator)
    b = torch.randn(70, 3, generator=generator)
    magnitude = 0.5 + torch.rand(70, generator=generator)
    base, module = weight.clone(), "layers.0.attn.q_proj"
    adapter = {f"{module}.lora_a.weight": a, f"{module}.lora_b.weight": b}
    adapter |= {f"{module}.magnitude": magnitude} if use_dora else {}
    config = AdapterConfig(r=3, alpha=4.0, target_modules=("q_proj",), use_dora=use_dora)
    merged = MeasuredMerge(
        StateDictSource({f"{module}.weight": weight}), StateDictSource(adapter), config, sampled
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (b.to(wide) @ a.to(wide)) * (4 / 3) + base.to(wide)
    if use_dora:
        expected = expected * (magnitude.to(wide) / expected.norm(dim=1))[:, None]
    stored = merged.read(f"{module}.weight")
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
    assert (stored.double() - expected.double()).abs().max() < tolerance
    assert (stored.double() - base.double()).abs().max() > 1
    assert torch.equal(weight, base)
    assert torch.equal(merged.read(f"{module}.weight"), stored)


def test_the_report_has_a_row_for_each_kind_of_module_and_a_total(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL, torch.bfloat16)
    assert merge(base, save_adapter(base, tmp_path / "run", ADAPTER), tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "rounding to bfloat16" in printed
    rows = dict(re.findall(r"^  (\w+) +(\d+) +[\d.]+%", printed, re.MULTILINE))
    kinds = {**dict.fromkeys((*ATTENTION, *MLP), "3"), "output": "1", "total": "22"}
    assert rows == kinds


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("to", ["hf", "meta"])
def test_a_directory_that_peft_wrote_is_merged_as_peft_does(tmp_path, use_dora, to):
    base = write_base(tmp_path / "base", MODEL)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=5, lora_alpha=7, target_modules="all-linear", use_dora=use_dora),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "peft")
    torch.save({"lr": 0.1}, tmp_path / "peft" / "training_args.bin")
    assert convert(base, tmp_path / "other", to) == 0
    assert merge(tmp_path / "other", tmp_path / "peft", tmp_path / "out", "--to", "hf") == 0
    expected = model.merge_and_unload().state_dict()
    found = weights(tmp_path / "out")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_another_base_is_refused_and_nothing_is_written(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    adapter = save_adapter(base, tmp_path / "run", ADAPTER)
    other = write_base(tmp_path / "other", MODEL, torch.bfloat16)
    assert merge(other, adapter, tmp_path / "out") == 1
    assert "trained on another base" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_directory_without_an_adapter_is_refused(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    (tmp_path / "empty").mkdir()
    assert merge(base, tmp_path / "empty", tmp_path / "out") == 1
    assert "adapter_model.pt" in capsys.readouterr().err
