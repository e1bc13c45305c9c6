"""Adapters on experts, one by one and in PEFT's packed form, against real PEFT."""

import json
from dataclasses import replace

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpointing import FullModelHFCheckpointer, MergedStateDict
from checkpointing.adapters import AdapterConfig
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.training import add_adapter, build_decoder
from checkpointing.training.lora import load_adapter
from tests.families.variants import (
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    SIZES,
    random_model,
    tokens,
)
from tests.tiny import ATTENTION, EXPERTS, assert_same_tensors, random_adapter

# The square one has experts as wide inside as outside, where a transposed matrix fits too.
MODELS = {
    "mixtral": ("mixtral", MIXTRAL_EXPERTS),
    "mixtral, square": ("mixtral", {**MIXTRAL_EXPERTS, "intermediate_size": 42}),
    "qwen3_moe": ("qwen3_moe", QWEN_EXPERTS),
}
ADAPTERS = {
    "all": AdapterConfig(4, 6, (*ATTENTION, *EXPERTS)),
    "rslora, ranks and alphas of their own": AdapterConfig(
        4,
        6,
        (*ATTENTION, *EXPERTS),
        use_rslora=True,
        rank_pattern={
            "layers.1.mlp.experts.up_proj": 3,
            "layers.2.mlp.experts.down_proj": 5,
            "layers.0.attn.k_proj": 2,
        },
        alpha_pattern={"layers.0.mlp.experts.gate_proj": 11},
    ),
    "gate alone": AdapterConfig(4, 6, ("gate_proj",)),
    "down alone": AdapterConfig(4, 6, ("down_proj",)),
}


def write(name, directory):
    model_type, options = MODELS[name]
    model = random_model(model_type, {**SIZES, **options})
    model.save_pretrained(directory)
    return model


def native_logits(checkpointer, state):
    native = build_decoder(checkpointer.model_config, state["model"], torch.float64)
    add_adapter(native, AdapterConfig.from_state(state["adapter_config"]), like=state["adapter"])
    load_adapter(native, state["adapter"])
    return native.double().eval()(tokens())


@pytest.mark.parametrize("form", ["portable", "exact"])
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", MODELS)
def test_peft_and_a_merge_compute_what_the_native_model_computes(tmp_path, name, kind, form):
    model, config = write(name, tmp_path / "base"), ADAPTERS[kind]
    checkpointer = FullModelHFCheckpointer(
        tmp_path / "base", output_dir=tmp_path / "out", adapter_form=form
    )
    weights = checkpointer.load_checkpoint()["model"]
    adapter = random_adapter(checkpointer.model_config.dims, config)
    state = {"model": weights, "adapter": adapter, "adapter_config": config.to_state()}
    merged = MergedStateDict(weights, adapter, config)
    saved = checkpointer.save_checkpoint({**state, "model": merged}, epoch=0)
    with torch.no_grad():
        expected = native_logits(checkpointer, state)
        base = model.double()(tokens()).logits
        assert (expected - base).abs().max() > 0.05
        again = PeftModel.from_pretrained(model, saved)
        assert (again(tokens()).logits - expected).abs().max() < 1e-5
        plain = build_decoder(checkpointer.model_config, dict(merged), torch.float64).eval()
        assert (plain(tokens()) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_packed_form_comes_back_with_the_same_update(tmp_path, kind):
    write("mixtral", tmp_path / "base")
    config = replace(ADAPTERS[kind], use_rslora=False)
    saving = FullModelHFCheckpointer(
        tmp_path / "base", output_dir=tmp_path / "out", adapter_form="exact"
    )
    adapter = random_adapter(saving.model_config.dims, config, dtype=torch.float64)
    state = {"adapter": adapter, "adapter_config": config.to_state()}
    saved = saving.save_checkpoint(state, epoch=0, adapter_only=True)
    (saved / "adapter_model.pt").unlink()
    (saved / "manifest.json").unlink()
    loading = FullModelHFCheckpointer(tmp_path / "base", adapter_checkpoint=saved)
    back = loading.load_checkpoint()
    weights = {name: tensor.double() for name, tensor in back["model"].items()}
    was = MergedStateDict(weights, adapter, config)
    now = MergedStateDict(
        weights, back["adapter"], AdapterConfig.from_state(back["adapter_config"])
    )
    for name in was:
        torch.testing.assert_close(now[name], was[name], rtol=1e-12, atol=1e-13)


def test_a_packed_adapter_of_peft_comes_in_and_goes_out_bit_for_bit(tmp_path):
    model = write("qwen3_moe", tmp_path / "base")
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        alpha_pattern={"gate.weight": 11, "experts.down_proj": 3},
        rank_pattern={"experts.gate_up_proj": 5},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(5)
    made = get_peft_model(model, config)
    made.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = made.double()(tokens()).logits
    checkpointer = FullModelHFCheckpointer(
        tmp_path / "base",
        output_dir=tmp_path / "out",
        adapter_checkpoint=tmp_path / "adapter",
        adapter_form="exact",
    )
    state = checkpointer.load_checkpoint()
    assert state["adapter"]["layers.1.mlp.experts.lora_up_a"].shape == (5, 42, 5)
    with torch.no_grad():
        assert (native_logits(checkpointer, state) - expected).abs().max() < 1e-5
    # Natively gate and up have an A each; what PEFT shares between them it has twice when written.
    saved = checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)
    again = PeftModel.from_pretrained(write("qwen3_moe", tmp_path / "base2"), saved).double()
    with torch.no_grad():
        assert (again(tokens()).logits - expected).abs().max() < 1e-5
    theirs = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ours = load_file(saved / "adapter_model.safetensors")
    same = [name for name in theirs if "base_layer" not in name]
    assert_same_tensors({name: ours[name] for name in same}, {name: theirs[name] for name in same})


def packed_by_hand(matrices: list[Tensor], expert_is_slowest: bool) -> Tensor:
    """PEFT's A of ``(rank, in)`` matrices, or its B of ``(out, rank)`` ones, element by element."""
    experts, (rows, columns) = len(matrices), matrices[0].shape
    if expert_is_slowest:
        packed = torch.empty(experts * rows, columns)
        for expert, matrix in enumerate(matrices):
            for row in range(rows):
                packed[expert * rows + row] = matrix[row]
        return packed
    packed = torch.empty(rows, columns * experts)
    for expert, matrix in enumerate(matrices):
        for column in range(columns):
            packed[:, column * experts + expert] = matrix[:, column]
    return packed


def test_in_a_the_expert_is_slowest_and_in_b_it_is_fastest(tmp_path):
    write("mixtral", tmp_path / "base")
    config = AdapterConfig(4, 6, ("down_proj",))
    checkpointer = FullModelHFCheckpointer(
        tmp_path / "base", output_dir=tmp_path / "out", adapter_form="exact"
    )
    adapter = random_adapter(checkpointer.model_config.dims, config)
    state = {"adapter": adapter, "adapter_config": config.to_state()}
    saved = checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)
    written = load_file(saved / "adapter_model.safetensors")
    for layer in range(3):
        a, b = (adapter[f"layers.{layer}.mlp.experts.lora_down_{part}"] for part in "ab")
        key = f"base_model.model.model.layers.{layer}.mlp.experts"
        # Natively (experts, in, rank) and (experts, rank, out).
        expected = packed_by_hand([matrix.T for matrix in a], expert_is_slowest=True)
        assert torch.equal(written[f"{key}.lora_A.weight"], expected)
        expected = packed_by_hand([matrix.T for matrix in b], expert_is_slowest=False)
        assert torch.equal(written[f"{key}.lora_B.weight"], expected)
    peft_config = json.loads((saved / "adapter_config.json").read_text())
    assert peft_config["target_parameters"] == ["experts.down_proj"]
    assert peft_config["lora_dropout"] == 0, "which PEFT does not have for parameters"
    assert peft_config["target_modules"] == []


def test_tensors_of_different_dtypes_are_packed_without_rounding(tmp_path):
    write("mixtral", tmp_path / "base")
    config = AdapterConfig(
        4, 6, ("gate_proj", "up_proj"), alpha_pattern={"layers.1.mlp.experts.up_proj": 7}
    )
    saving = FullModelHFCheckpointer(
        tmp_path / "base", output_dir=tmp_path / "out", adapter_form="exact"
    )
    # Of gate B is short, of up both are.
    adapter = {
        name: tensor.bfloat16() if name.endswith("gate_b") or "_up_" in name else tensor
        for name, tensor in random_adapter(saving.model_config.dims, config).items()
    }
    state = {"adapter": adapter, "adapter_config": config.to_state()}
    saved = saving.save_checkpoint(state, epoch=0, adapter_only=True)
    key = "base_model.model.model.layers.{}.mlp.experts.lora_{}.weight"
    written = load_file(saved / "adapter_model.safetensors")
    dtypes = [written[key.format(layer, end)].dtype for layer in (0, 1) for end in "AB"]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    for name in ("adapter_model.pt", "manifest.json"):
        (saved / name).unlink()
    back = FullModelHFCheckpointer(tmp_path / "base", adapter_checkpoint=saved).load_checkpoint()
    again = AdapterConfig.from_state(back["adapter_config"])
    weights = {name: tensor.double() for name, tensor in back["model"].items()}
    was = MergedStateDict(weights, adapter, config)
    now = MergedStateDict(weights, back["adapter"], again)
    for name in was:
        torch.testing.assert_close(now[name], was[name], rtol=1e-6, atol=1e-7)


def test_packed_tensors_that_do_not_fit_are_refused_by_name(tmp_path):
    write("mixtral", tmp_path / "base")
    key = "base_model.model.model.layers.0.mlp.experts"
    save_file(
        {
            f"{key}.base_layer.lora_A.weight": torch.ones(19, 42),
            f"{key}.base_layer.lora_B.weight": torch.ones(112, 20),
            f"{key}.lora_A.weight": torch.ones(20, 56),
            "base_model.model.model.layers.1.mlp.experts.lora_A.weight": torch.ones(20, 56),
            "base_model.model.model.layers.1.mlp.experts.lora_B.weight": torch.ones(42, 19),
        },
        tmp_path / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "target_parameters": ["experts.down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    checkpointer = FullModelHFCheckpointer(tmp_path / "base", adapter_checkpoint=tmp_path)
    with pytest.raises(TensorMismatchError) as caught:
        checkpointer.load_checkpoint()
    assert set(caught.value.problems) == {
        f"{key}.base_layer.lora_A.weight: [19, 42], expected [5 * rank, 42]",
        f"{key}.lora_B.weight: missing, expected [42, 20]",
        "base_model.model.model.layers.1.mlp.experts.lora_B.weight: [42, 19], expected [42, 20]",
    }


def test_a_form_in_which_peft_would_leave_out_dense_layers_is_refused_or_said(tmp_path, caplog):
    options = {**SIZES, **QWEN_EXPERTS, "mlp_only_layers": [1]}
    random_model("qwen3_moe", options).save_pretrained(tmp_path / "base")
    config = AdapterConfig(4, 6, ("w1", "w3", *EXPERTS))
    arguments = {"checkpoint_dir": tmp_path / "base", "output_dir": tmp_path / "out"}
    checkpointer = FullModelHFCheckpointer(**arguments)
    adapter = random_adapter(checkpointer.model_config.dims, config)
    state = {"adapter": adapter, "adapter_config": config.to_state()}
    checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)
    assert "PEFT leaves out the adapters on 2 feed-forward modules of dense layers" in caplog.text
    exact = FullModelHFCheckpointer(**arguments, adapter_form="exact")
    with pytest.raises(ConfigError, match=r"such as layers\.1\.mlp\.w1"):
        exact.check_save(state, adapter_only=True)


def test_dora_on_experts_is_refused_here_as_in_peft(tmp_path):
    model = write("mixtral", tmp_path / "base")
    with pytest.raises(ValueError, match="does not work with use_dora"):
        get_peft_model(
            model, peft.LoraConfig(target_parameters=["experts.down_proj"], use_dora=True)
        )
    checkpointer = FullModelHFCheckpointer(tmp_path / "base")
    weights = checkpointer.load_checkpoint()["model"]
    native = build_decoder(checkpointer.model_config, weights, torch.float32)
    with pytest.raises(ConfigError, match="no DoRA for experts"):
        add_adapter(native, AdapterConfig(4, 6, EXPERTS, use_dora=True))
