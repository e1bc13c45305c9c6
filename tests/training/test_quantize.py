"""QLoRA: what the base in NF4 computes, what is trained on it, saved of it and merged into it."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.cli.main import main
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.tensors import StateDictSource
from checkpointing.nf4 import NF4Rounding, block_sizes, dequantized
from checkpointing.training import (
    add_adapter,
    base_state_dict,
    build_decoder,
    load_adapter,
    quantize_base,
)
from tests.tiny import random_adapter
from tests.training import peers, runs
from tests.training.runs import checkpoints, metrics, run, run_until, same, weights

NF4 = "model.quantize_base=True"
RESUME_ANYHOW = ("resume_from_checkpoint=True", "resume_override=True")
SAVING = "save_every_n_steps=3"
TARGETS = ("q_proj", "v_proj", "w1", "w2")
LORA = AdapterConfig(5, 12.0, TARGETS)
KINDS = {
    "lora": LORA,
    "rslora": replace(LORA, use_rslora=True),
    "dora": replace(LORA, use_dora=True),
}
# The table of torchao, which is that of the paper's appendix E to four digits.
NEGATIVE = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911)
TABLE = torch.tensor([*NEGATIVE, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1])


def nf4_by_hand(weight, block, scale_block):
    """Section 3 of the paper: 4-bit elements, 8-bit scales, which are centred before."""
    blocks = weight.reshape(-1, block)
    scales = blocks.abs().amax(dim=1)
    table = TABLE.to(weight.dtype)
    elements = table[((blocks / scales[:, None])[..., None] - table).abs().argmin(-1)]
    centred = (scales - scales.mean()).reshape(-1, scale_block)
    step = centred.abs().amax(dim=1, keepdim=True) / 128
    scales = ((centred / step).round().clamp(-128, 127) * step).flatten() + scales.mean()
    return (elements * scales[:, None]).reshape(weight.shape)


def is_nf4(tensor):
    return type(tensor).__name__ == "NF4Tensor"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


def quantized_model(cfg, dtype):
    native = peers.native_weights(peers.hf_model(cfg), cfg)
    model = build_decoder(cfg, native, dtype)
    quantize_base(model, NF4Rounding(dtype), "cpu")
    return model


# 42 * 84 = 56 * 63 elements; 64 * 216 * 24 = 576 * 576, which 64 * 256 does not divide.
@pytest.mark.parametrize(
    ("shape", "blocks"), [((42, 84), (56, 63)), ((576, 576), (64, 216)), ((192, 512), (64, 256))]
)
def test_a_weight_is_rounded_as_the_paper_says(shape, blocks):
    weight = 0.2 * torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    rounding = NF4Rounding(torch.float32)
    rounded = rounding.rounded(StateDictSource({"layers.0.mlp.w1.weight": weight}))
    expected = nf4_by_hand(weight, *blocks)
    torch.testing.assert_close(rounded["layers.0.mlp.w1.weight"], expected, rtol=0, atol=1e-6)
    assert 0.05 < (expected - weight).norm() / weight.norm() < 0.15


@pytest.mark.parametrize(
    ("model", "hidden", "query", "key_value", "ffn"),
    [
        ("Llama-3.2-1B", 2048, 2048, 512, 8192),
        ("Llama-3.1-8B", 4096, 4096, 1024, 14336),
        ("Qwen2.5-0.5B", 896, 896, 128, 4864),
        ("Qwen2.5-1.5B", 1536, 1536, 256, 8960),
        ("Qwen2.5-7B", 3584, 3584, 512, 18944),
        ("gemma-2b", 2048, 2048, 256, 16384),
        ("gemma-2-2b", 2304, 2048, 1024, 9216),
        ("Phi-3-mini", 3072, 3072, 3072, 8192),
        ("SmolLM2-135M", 576, 576, 192, 1536),
        ("SmolLM2-360M", 960, 960, 320, 2560),
    ],
)
def test_the_weights_of_real_models_are_cut_into_the_blocks_of_the_paper(
    model, hidden, query, key_value, ffn
):
    for out in (query, key_value, ffn):
        block, scale_block = block_sizes((out, hidden))
        assert (out * hidden) % (block * scale_block) == 0
        assert block == 64
        assert 200 <= scale_block <= 256


def test_only_the_linear_weights_of_the_layers_are_rounded():
    cfg = peers.config(attention_bias=True, mlp_bias=True)
    native = peers.native_weights(peers.hf_model(cfg), cfg)
    model = quantized_model(cfg, torch.float32)
    found = dict(model.named_parameters())
    rounded = {name for name, tensor in found.items() if is_nf4(tensor)}
    linears = {
        f"layers.{layer}.{module}.weight"
        for layer in range(cfg.dims.layers)
        for module in peers.MODULES.values()
    }
    assert rounded == linears
    assert not any(parameter.requires_grad for parameter in found.values())
    assert same({n: found[n].detach() for n in native.keys() - linears}, {
        n: native[n] for n in native.keys() - linears
    })  # fmt: skip


@pytest.mark.parametrize("adapter", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_logits_and_gradients_are_those_of_the_dequantised_base(adapter, biased):
    cfg = peers.config(attention_bias=biased, mlp_bias=biased)
    model = quantized_model(cfg, torch.float64)
    dense = build_decoder(cfg, dict(dequantized(base_state_dict(model))), torch.float64)
    tensors = random_adapter(cfg.dims, adapter, dtype=torch.float64)
    tokens = peers.tokens()
    logits = {}
    for each in (model, dense):
        add_adapter(each, adapter)
        for module in each.modules():
            # The adapter is fp32 in training; in fp64 a difference is an error and not noise.
            if isinstance(module, nn.Linear) and module.weight.requires_grad:
                module.double()
            if hasattr(module, "magnitude"):
                module.magnitude.data = module.magnitude.data.double()
        load_adapter(each, tensors)
        logits[each] = each(tokens)
        logits[each].square().mean().backward()
    # DoRA's norms are computed in fp32.
    assert (logits[model] - logits[dense]).abs().max() < 1e-9
    gradients = {n: p.grad for n, p in dense.named_parameters() if p.requires_grad}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients.pop(name), rtol=1e-9, atol=1e-12)
    assert not gradients


@pytest.mark.parametrize("adapter", KINDS.values(), ids=KINDS)
def test_no_dense_weight_is_kept_for_the_backward_pass(adapter):
    cfg = peers.config()
    model = quantized_model(cfg, torch.float32)
    add_adapter(model, replace(adapter, dropout=0.1))
    model.train()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(peers.tokens())
    dense = {tuple(t.shape) for t in kept if type(t) is torch.Tensor and t.dim() == 2}
    dims = cfg.dims
    sizes = (dims.hidden, dims.query, dims.key_value, dims.ffn)
    assert any(is_nf4(t) for t in kept)
    assert not dense & {(out, in_) for out in sizes for in_ in sizes}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_rounded_weights_take_little_more_than_four_bits_an_element(dtype):
    # The widths of SmolLM2-135M.
    cfg = peers.config(layers=2, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64)
    model = quantized_model(cfg, dtype)
    elements = stored = 0
    for parameter in model.parameters():
        if is_nf4(parameter):
            parts, _ = parameter.__tensor_flatten__()
            elements += parameter.numel()
            stored += sum(getattr(parameter, p).untyped_storage().nbytes() for p in parts)
    assert elements == 2 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    # 4 bits, and 8 bits of scale for 64 elements.
    assert 4.125 <= stored * 8 / elements < 4.14


def test_experts_and_their_router_are_not_rounded():
    shapes = {
        "layers.1.mlp.router.gate.weight": (4, 6),
        "layers.1.mlp.experts.gate_proj": (4, 6, 8),
        "layers.1.attn.q_proj.weight": (10, 6),
    }
    tensors = {name: torch.linspace(1, 2, math.prod(s)).reshape(s) for name, s in shapes.items()}
    rounded = NF4Rounding(torch.float32).rounded(StateDictSource(tensors))
    changed = [name for name, tensor in tensors.items() if not torch.equal(rounded[name], tensor)]
    assert changed == ["layers.1.attn.q_proj.weight"]


def test_a_weight_with_an_odd_number_of_elements_is_named_before_anything_is_rounded():
    tensors = {
        "layers.0.mlp.w1.weight": torch.ones(6, 5),
        "layers.0.mlp.w2.weight": torch.ones(5, 7),
        "output.weight": torch.ones(3, 7),
    }
    with pytest.raises(TensorMismatchError) as caught:
        NF4Rounding(torch.float32).rounded(StateDictSource(tensors))
    assert caught.value.problems == (
        "layers.0.mlp.w2.weight: [5, 7] has an odd number of elements",
    )


@pytest.mark.parametrize(
    "settings", [(), ("model.use_dora=True", "dtype=bf16")], ids=["lora fp32", "dora bf16"]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(base, tmp_path, settings):
    run("lora", base, tmp_path / "whole", NF4, SAVING, *settings)
    run_until(7, "lora", base, tmp_path / "stopped", NF4, SAVING, *settings)
    assert "step_6" in checkpoints(tmp_path / "stopped")
    resume = "resume_from_checkpoint=True"
    run("lora", base, tmp_path / "stopped", NF4, SAVING, *settings, resume)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    found, expected = (weights(tmp_path / out / "epoch_1") for out in ("stopped", "whole"))
    assert same(found, expected)
    run("lora", base, tmp_path / "dense", *settings)
    assert metrics(tmp_path / "dense")[8] != metrics(tmp_path / "whole")[8]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((NF4,), (), r"quantize_base=True \(nf4 of float32\) then, and .*=False now"),
        ((), (NF4,), r"quantize_base=False then, and .*=True \(nf4 of float32\) now"),
        ((NF4,), (NF4, "dtype=bf16"), r"nf4 of float32\) then, and .*nf4 of bfloat16\) now"),
    ],
)
def test_a_run_does_not_go_on_with_another_rounding(base, tmp_path, before, after, message):
    run("lora", base, tmp_path, "epochs=1", "max_steps_per_epoch=1", *before)
    with pytest.raises(ConfigError, match=message):
        run("lora", base, tmp_path, *RESUME_ANYHOW, *after)


def test_the_merged_model_is_the_rounded_base_with_the_update(base, tmp_path):
    run("lora", base, tmp_path, NF4, "epochs=1")
    source = AutoModelForCausalLM.from_pretrained(base).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "epoch_0/merged").state_dict()
    adapter = torch.load(tmp_path / "epoch_0/adapter_model.pt", weights_only=True)
    # 28 * 42 = 56 * 21 elements, 56 * 42 = 56 * 42 and 42 * 84 = 56 * 63.
    for hf, native, blocks in (
        ("self_attn.v_proj", "attn.v_proj", (56, 21)),
        ("mlp.gate_proj", "mlp.w1", (56, 42)),
        ("self_attn.o_proj", "attn.output_proj", (56, 63)),
    ):
        expected = nf4_by_hand(source[f"model.layers.1.{hf}.weight"], *blocks)
        if native != "attn.output_proj":
            a, b = (adapter[f"layers.1.{native}.lora_{part}.weight"] for part in "ab")
            assert b.abs().max() > 1e-3
            expected = expected + 7 / 3 * b @ a
        found = merged[f"model.layers.1.{hf}.weight"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(merged[name], source[name])


@pytest.mark.parametrize("settings", [("model.use_dora=True",), ("dtype=bf16",)], ids=str)
def test_tune_merge_gives_what_the_run_has_merged(base, tmp_path, capsys, settings):
    run("lora", base, tmp_path, NF4, "epochs=1", *settings)
    checkpoint = str(tmp_path / "epoch_0")
    assert main(["merge", str(base), checkpoint, str(tmp_path / "merged")]) == 0
    assert "rounded to NF4" in capsys.readouterr().out
    assert same(weights(tmp_path / "merged"), weights(tmp_path / "epoch_0/merged"))


def test_tune_merge_takes_the_base_as_it_is_where_it_is_told_to(base, tmp_path):
    run("lora", base, tmp_path, NF4, "epochs=1")
    checkpoint, out = tmp_path / "epoch_0", tmp_path / "merged"
    assert main(["merge", str(base), str(checkpoint), str(out), "--original-base"]) == 0
    peer = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(checkpoint))
    expected = peer.merge_and_unload().state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_tune_parity_compares_on_the_rounded_base(base, tmp_path, capsys):
    run("lora", base, tmp_path, NF4, "epochs=1")
    assert main(["parity", str(tmp_path / "epoch_0")]) == 0
    assert "transformers + PEFT, base in NF4" in capsys.readouterr().out


@pytest.mark.parametrize("adapter", KINDS.values(), ids=KINDS)
def test_peft_computes_the_same_with_the_adapter_on_the_dequantised_base(base, tmp_path, adapter):
    cfg = runs.MODEL
    model = quantized_model(cfg, torch.float64)
    dense = dequantized(base_state_dict(model))
    tensors = random_adapter(cfg.dims, adapter)
    state = {"adapter": tensors, "adapter_config": adapter.to_state()}
    checkpointer = FullModelHFCheckpointer(base, output_dir=tmp_path)
    saved = checkpointer.save_checkpoint({**state, "model": dense}, epoch=0, dir_prefix="epoch")
    merged = checkpointer.save_checkpoint(
        {**state, "model": MergedStateDict(dense, tensors, adapter)}, epoch=1
    )
    add_adapter(model, adapter)
    load_adapter(model, tensors)
    tokens = peers.tokens()
    plain = AutoModelForCausalLM.from_pretrained(saved / "merged", dtype=torch.float64)
    with torch.no_grad():
        found = model(tokens)
        assert (plain(tokens).logits - found).abs().max() > 0.05
        peer = PeftModel.from_pretrained(plain, str(saved)).double()
        assert (peer(tokens).logits - found).abs().max() < 1e-5
        peer = AutoModelForCausalLM.from_pretrained(merged / "merged", dtype=torch.float64)
        assert (peer(tokens).logits - found).abs().max() < 1e-5


def test_a_peft_adapter_can_be_trained_on_with_a_base_in_nf4(base, tmp_path):
    run("lora", base, tmp_path / "first", "epochs=1")
    named = f"+checkpointer.adapter_checkpoint={tmp_path}/first/epoch_0"
    run("lora", base, tmp_path / "second", NF4, "optimizer.lr=0.0", "epochs=1", named)
    first, second = (
        torch.load(tmp_path / out / "epoch_0/adapter_model.pt", weights_only=True)
        for out in ("first", "second")
    )
    assert same(first, second)


def test_a_torchao_without_nf4_is_named_with_its_version_and_what_to_install(tmp_path):
    (tmp_path / "torchao" / "quantization").mkdir(parents=True)
    for package in ("torchao", "torchao/quantization"):
        (tmp_path / package / "__init__.py").touch()
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\n"
        "from checkpointing.nf4 import NF4Rounding\n"
        "NF4Rounding(torch.float32).quantized(torch.ones(4, 6))"
    )
    repository = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=repository
    )
    message = result.stderr.splitlines()[-1]
    assert "ConfigError: NF4 needs torchao 0.13 to 0.18, and torchao 0." in message
    assert "torchao.quantization: module" in message
    assert "torchao.dtypes: No module named" in message
    assert message.endswith("pip install torchao==0.18.0")
