"""Adapters by Megatron-Bridge's names; expected are weights that were computed by hand."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from transformers import AutoModelForCausalLM

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.adapter_checkpoint import open_adapter
from checkpointing.cli.main import main
from checkpointing.convert_adapter import plan_adapter_conversion
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.formats.detect import find_model
from checkpointing.mapping.model_parallel import Parallel
from tests.families.variants import tokens
from tests.formats.megatron_model import (
    hf_weights,
    split,
    write_hf,
    write_megatron,
    write_rank,
    write_root,
)
from tests.formats.test_torch_dist import one_by_one, stacked
from tests.tiny import ATTENTION, EXPERTS, MLP, assert_same_tensors, random_adapter

RANK, ALPHA = 8, 20
SCALE = 2.5
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
}
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 3, 42, 56, 6, 2, 14


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of models of transformers, made when they are asked for."""
    root = tmp_path_factory.mktemp("models")

    def model(name):
        model_type, options = MODELS[name]
        directory = root / name
        return directory if directory.is_dir() else write_hf(directory, model_type, **options)

    return model


def rows_of(part):
    """Rows of the fused module, of 3 queries, a key and a value of width 14 for each key head."""
    heads = {"q": (0, 1, 2), "k": (3,), "v": (4,)}[part]
    starts = [HEAD_DIM * (5 * group + head) for group in range(KV_HEADS) for head in heads]
    return [row for start in starts for row in range(start, start + HEAD_DIM)]


def attention_adapter(dora=False):
    """Of all layers, by Megatron-Bridge's names, whole."""
    torch.manual_seed(3)
    tensors = {}
    for layer in range(LAYERS):
        start = f"decoder.layers.{layer}.self_attention."
        for name, out, in_ in (
            ("linear_qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            ("linear_proj", HIDDEN, HEADS * HEAD_DIM),
        ):
            tensors |= adapter_of(start + name, out, in_, dora)
    return tensors


def adapter_of(module, out, in_, dora=False):
    tensors = {
        f"{module}.adapter.linear_in.weight": 0.1 * torch.randn(RANK, in_),
        f"{module}.adapter.linear_out.weight": 0.1 * torch.randn(out, RANK),
    }
    if dora:
        tensors[f"{module}.adapter.weight_magnitude"] = 0.5 + torch.rand(out)
    return tensors


def dense_adapter(dora=False):
    tensors = attention_adapter(dora)
    for layer in range(LAYERS):
        start = f"decoder.layers.{layer}.mlp."
        tensors |= adapter_of(start + "linear_fc1", 2 * FFN, HIDDEN, dora)
        tensors |= adapter_of(start + "linear_fc2", HIDDEN, FFN, dora)
    return tensors


def update(tensors, module):
    pair = [tensors[f"{module}.adapter.linear_{end}.weight"] for end in ("out", "in")]
    return SCALE * (pair[0] @ pair[1])


def dense_updates(tensors):
    """What is added to each weight of transformers' model."""
    updates = {}
    for layer in range(LAYERS):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        fused = update(tensors, meg + "self_attention.linear_qkv")
        for part in "qkv":
            updates[f"{hf}self_attn.{part}_proj.weight"] = fused[rows_of(part)]
        proj = update(tensors, meg + "self_attention.linear_proj")
        updates[f"{hf}self_attn.o_proj.weight"] = proj
        if f"{meg}mlp.linear_fc1.adapter.linear_in.weight" in tensors:
            both = update(tensors, meg + "mlp.linear_fc1")
            updates[f"{hf}mlp.gate_proj.weight"] = both[:FFN]
            updates[f"{hf}mlp.up_proj.weight"] = both[FFN:]
            updates[f"{hf}mlp.down_proj.weight"] = update(tensors, meg + "mlp.linear_fc2")
    return updates


def shard(name, tensor, ranks, rank):
    """What a tensor-parallel rank has (Megatron-Bridge, ParallelLinearAdapter)."""
    row_parallel = "linear_proj" in name or "linear_fc2" in name
    if name.endswith("linear_in.weight"):
        return tensor.chunk(ranks, 1 if row_parallel else 0)[rank].clone()
    if name.endswith("weight_magnitude") and row_parallel:
        return tensor
    if "linear_fc1.adapter.linear_out" in name or "linear_fc1.adapter.weight_mag" in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    return tensor.chunk(ranks)[rank].clone()


def write_settings(directory, **changes):
    peft = {"dim": RANK, "alpha": ALPHA, "dropout": 0.1, **changes}
    lines = ["model:", "  num_layers: 3", "peft:", "  _target_: megatron.bridge.peft.lora.LoRA"]
    lines += [f"  {key}: {value}" for key, value in peft.items()]
    (directory / "run_config.yaml").write_text("\n".join(lines) + "\n")


def write_adapter(directory, hf, tensors, ranks=1):
    """An adapter as tensor-parallel ranks save it."""
    iteration = write_root(directory, hf)
    (directory / "config.json").unlink()
    for rank in range(ranks):
        own = {name: shard(name, tensor, ranks, rank) for name, tensor in tensors.items()}
        write_rank(iteration / f"mp_rank_{rank:02d}", own)
    write_settings(iteration)
    return directory


def merged(base, adapter, out):
    assert main(["merge", str(base), str(adapter), str(out), "--to", "hf"]) == 0
    return hf_weights(out)


def assert_updated(found, base, updates):
    assert found.keys() == base.keys()
    for name, tensor in base.items():
        expected = tensor + updates.get(name, 0)
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6, msg=name)
        assert torch.equal(found[name], tensor) == (name not in updates)


def logits(model):
    with torch.inference_mode():
        return model.eval()(input_ids=tokens()).logits


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_base_and_adapter_of_megatron_give_a_merged_model_in_one_step(
    models, tmp_path, name, ranks
):
    hf, tensors = models(name), dense_adapter()
    base = write_megatron(tmp_path / "base", hf, tensor=ranks)
    adapter = write_adapter(tmp_path / "adapter", hf, tensors, ranks)
    found = merged(base, adapter, tmp_path / "out")
    assert_updated(found, hf_weights(hf), dense_updates(tensors))


def test_pefts_form_of_it_computes_the_same_as_the_merged_model(models, tmp_path):
    hf, tensors = models("llama"), dense_adapter()
    adapter = write_adapter(tmp_path / "adapter", hf, tensors, ranks=2)
    merged(hf, adapter, tmp_path / "merged")
    command = ["convert", str(adapter), str(tmp_path / "peft"), "--to", "peft", "--base", str(hf)]
    assert main(command) == 0
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto"))
    model = AutoModelForCausalLM.from_pretrained(hf, dtype="auto")
    plain = logits(model)
    found = logits(PeftModel.from_pretrained(model, tmp_path / "peft"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - plain).abs().max() > 0.1


def test_dora_of_all_modules(models, tmp_path):
    hf, tensors = models("qwen2"), dense_adapter(dora=True)
    adapter = write_adapter(tmp_path / "adapter", hf, tensors, ranks=2)
    found = merged(hf, adapter, tmp_path / "out")
    base = hf_weights(hf)
    for name, added in dense_updates(tensors).items():
        layer, kind = name.split(".")[2], name.split(".")[-2]
        module = {"q": "self_attention.linear_qkv", "o": "self_attention.linear_proj"}.get(kind[0])
        rows = slice(None)
        if kind in ("q_proj", "k_proj", "v_proj"):
            module, rows = "self_attention.linear_qkv", rows_of(kind[0])
        elif kind in ("gate_proj", "up_proj"):
            module = "mlp.linear_fc1"
            rows = slice(0, FFN) if kind == "gate_proj" else slice(FFN, None)
        elif kind == "down_proj":
            module = "mlp.linear_fc2"
        magnitude = tensors[f"decoder.layers.{layer}.{module}.adapter.weight_magnitude"][rows]
        weight = base[name] + added
        expected = magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_parts_with_adapters_of_their_own(models, tmp_path):
    hf = models("llama")
    torch.manual_seed(5)
    tensors, updates = {}, {}
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for layer in range(LAYERS):
        start = f"decoder.layers.{layer}."
        for part, out in sizes.items():
            # Its rows are those of q, k or v alone, head by head.
            a, b = 0.1 * torch.randn(RANK, HIDDEN), 0.1 * torch.randn(out, RANK)
            name = f"{start}self_attention.linear_qkv.adapter.adapter_{part}."
            tensors |= {f"{name}linear_in.weight": a, f"{name}linear_out.weight": b}
            updates[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = SCALE * (b @ a)
        for part in ("gate", "up"):
            a, b = 0.1 * torch.randn(RANK, HIDDEN), 0.1 * torch.randn(FFN, RANK)
            name = f"{start}mlp.linear_fc1.adapter.adapter_{part}."
            tensors |= {f"{name}linear_in.weight": a, f"{name}linear_out.weight": b}
            updates[f"model.layers.{layer}.mlp.{part}_proj.weight"] = SCALE * (b @ a)
        tensors |= adapter_of(start + "mlp.linear_fc2", HIDDEN, FFN)
        down = update(tensors, start + "mlp.linear_fc2")
        updates[f"model.layers.{layer}.mlp.down_proj.weight"] = down
    adapter = write_adapter(tmp_path / "adapter", hf, tensors, ranks=2)
    assert_updated(merged(hf, adapter, tmp_path / "out"), hf_weights(hf), updates)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("grouped", [True, False], ids=["of a rank", "of an expert"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_on_two_ranks_have_the_adapters_of_their_rank(
    models, tmp_path, name, grouped, tensor
):
    hf = models(name)
    ffn = 24 if name == "qwen3_moe" else FFN
    shared = attention_adapter()
    updates = dense_updates(shared)
    iteration = write_root(tmp_path / "adapter", hf)
    (tmp_path / "adapter" / "config.json").unlink()
    block, (gate, up, down) = (
        ("mlp", ("gate_proj", "up_proj", "down_proj"))
        if name == "qwen3_moe"
        else ("block_sparse_moe", ("w1", "w3", "w2"))
    )
    for number, experts in enumerate(split(4, 2)):
        own = dict(shared)
        for layer in range(LAYERS):
            for local, expert in enumerate(experts):
                place = "" if grouped else f"local_experts.{local}."
                module = f"decoder.layers.{layer}.mlp.experts.{place}"
                if not grouped or local == 0:
                    own |= adapter_of(module + "linear_fc1", 2 * ffn, HIDDEN)
                    own |= adapter_of(module + "linear_fc2", HIDDEN, ffn)
                both = update(own, module + "linear_fc1")
                hf_name = f"model.layers.{layer}.{block}.experts.{expert}."
                updates[f"{hf_name}{gate}.weight"] = both[:ffn]
                updates[f"{hf_name}{up}.weight"] = both[ffn:]
                updates[f"{hf_name}{down}.weight"] = update(own, module + "linear_fc2")
        for rank in range(tensor):
            part = {n: shard(n, t, tensor, rank) for n, t in own.items()}
            write_rank(
                iteration / f"mp_rank_{rank:02d}_{number:03d}", part, pipeline_model_parallel_size=1
            )
    write_settings(tmp_path / "adapter")
    base = write_megatron(tmp_path / "base", hf, expert=2, grouped=True)
    found = merged(base, tmp_path / "adapter", tmp_path / "out")
    assert_updated(found, hf_weights(hf), updates)


@pytest.mark.parametrize("layout", [stacked, one_by_one])
def test_an_adapter_in_a_distributed_checkpoint(models, tmp_path, layout):
    hf, tensors = models("mixtral"), attention_adapter()
    updates = dense_updates(tensors)
    for layer in range(LAYERS):
        # Of the grouped experts, which all share it.
        module = f"decoder.layers.{layer}.mlp.experts.linear_fc2"
        own = adapter_of(module, HIDDEN, FFN)
        tensors |= {name.replace(".experts.", ".experts.experts."): t for name, t in own.items()}
        for expert in range(4):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"
            updates[name] = update(own, module)
    iteration = write_root(tmp_path / "adapter", hf)
    (tmp_path / "adapter" / "config.json").unlink()
    dcp.save(layout(tensors), checkpoint_id=iteration, no_dist=True)
    write_settings(iteration)
    found = merged(hf, tmp_path / "adapter", tmp_path / "out")
    assert_updated(found, hf_weights(hf), updates)


def saved_run(hf, directory, config):
    """An adapter of a run; its tensors and the checkpoint that holds it."""
    checkpointer = FullModelHFCheckpointer(hf, output_dir=directory)
    adapter = random_adapter(checkpointer.model_config.dims, config)
    state = {"adapter": adapter, "adapter_config": config.to_state()}
    return adapter, checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)


def test_parts_that_do_not_share_a_are_written_stacked_with_a_block_diagonal_b(models, tmp_path):
    config = AdapterConfig(4, 6, (*ATTENTION, *MLP))
    adapter, run = saved_run(models("qwen2"), tmp_path / "run", config)
    assert main(["convert", str(run), str(tmp_path / "out"), "--to", "megatron"]) == 0
    file = tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    tensors = torch.load(file, weights_only=True)["model"]
    assert len(tensors) == LAYERS * 4 * 2
    # Three parts of rank 4: rank and alpha grow together, so that alpha / rank stays 6 / 4.
    settings = json.loads((tmp_path / "out" / "run_config.yaml").read_text())["peft"]
    assert (settings["dim"], settings["alpha"]) == (12, 18)
    assert settings["target_modules"] == ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"]
    a = tensors["decoder.layers.1.self_attention.linear_qkv.adapter.linear_in.weight"]
    b = tensors["decoder.layers.1.self_attention.linear_qkv.adapter.linear_out.weight"].clone()
    for number, part in enumerate("qkv"):
        ranks = slice(4 * number, 4 * number + 4)
        native = f"layers.1.attn.{part}_proj"
        assert torch.equal(a[ranks], adapter[f"{native}.lora_a.weight"])
        assert torch.equal(b[rows_of(part), ranks], adapter[f"{native}.lora_b.weight"])
        b[rows_of(part), ranks] = 0
    assert not b.any()
    down = tensors["decoder.layers.1.mlp.linear_fc2.adapter.linear_in.weight"]
    assert torch.equal(down[:4], adapter["layers.1.mlp.w2.lora_a.weight"]) and not down[4:].any()


@pytest.mark.parametrize(
    ("name", "config", "parallel"),
    [
        ("llama", AdapterConfig(4, 6, (*ATTENTION, *MLP)), Parallel(tensor=2, pipeline=3)),
        ("llama", AdapterConfig(4, 6, ("q_proj", "v_proj"), use_rslora=True), Parallel()),
        (
            "qwen2",
            AdapterConfig(4, 6, (*ATTENTION, *MLP), use_dora=True),
            Parallel(tensor=2),
        ),
        ("mixtral", AdapterConfig(4, 6, (*ATTENTION, *EXPERTS)), Parallel(tensor=2, expert=2)),
        ("qwen3_moe", AdapterConfig(4, 6, EXPERTS), Parallel(pipeline=3, expert=4)),
    ],
    ids=str,
)
def test_what_is_written_merges_to_the_same_weights(models, tmp_path, name, config, parallel):
    hf = models(name)
    _, run = saved_run(hf, tmp_path / "run", config)
    ranks = [
        "--tensor-parallel",
        str(parallel.tensor),
        "--pipeline-parallel",
        str(parallel.pipeline),
        "--expert-parallel",
        str(parallel.expert),
    ]
    command = ["convert", str(run), str(tmp_path / "adapter"), "--to", "megatron", *ranks]
    assert main(command) == 0
    assert main(["verify", str(tmp_path / "adapter")]) == 0
    found = merged(hf, tmp_path / "adapter", tmp_path / "out")
    expected = merged(hf, run, tmp_path / "expected")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_an_adapter_that_shares_a_keeps_its_bits_on_its_way_through_the_native_form(
    models, tmp_path
):
    hf, tensors = models("llama"), dense_adapter()
    adapter = write_adapter(tmp_path / "adapter", hf, tensors, ranks=2)
    base = ["--base", str(hf)]
    assert main(["convert", str(adapter), str(tmp_path / "tune"), "--to", "tune", *base]) == 0
    command = ["convert", str(tmp_path / "tune"), str(tmp_path / "back"), "--to", "megatron"]
    assert main(command) == 0
    file = tmp_path / "back" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    assert_same_tensors(torch.load(file, weights_only=True)["model"], tensors)


def test_training_goes_on_from_it(models, tmp_path):
    hf, tensors = models("llama"), dense_adapter()
    adapter = write_adapter(tmp_path / "adapter", hf, tensors)
    checkpointer = FullModelHFCheckpointer(hf, adapter_checkpoint=adapter)
    loaded = checkpointer.load_checkpoint()["adapter"]
    a = loaded["layers.2.attn.k_proj.lora_a.weight"]
    module = "decoder.layers.2.self_attention.linear_qkv.adapter."
    assert torch.equal(a, tensors[f"{module}linear_in.weight"])
    # v has no rotary positions, so its rows stay in order.
    b = loaded["layers.2.attn.v_proj.lora_b.weight"]
    assert torch.equal(b, tensors[f"{module}linear_out.weight"][rows_of("v")])


def test_an_adapter_on_some_layers_of_a_pipeline_stays_on_these(tmp_path):
    hf = write_hf(tmp_path / "hf", "llama", num_hidden_layers=4)
    iteration = write_root(tmp_path / "adapter", hf)
    # Two stages of two layers: the first has an adapter on its first layer, the second on its last.
    first = adapter_of("decoder.layers.0.mlp.linear_fc2", HIDDEN, FFN)
    last = adapter_of("decoder.layers.1.self_attention.linear_proj", HIDDEN, HEADS * HEAD_DIM)
    write_rank(iteration / "mp_rank_00_000", first)
    write_rank(iteration / "mp_rank_00_001", last)
    write_settings(tmp_path / "adapter")
    found = open_adapter(tmp_path / "adapter", find_model(hf).open())
    assert {name.rsplit(".", 2)[0] for name in found.tensors.metas} == {
        "layers.0.mlp.w2",
        "layers.3.attn.output_proj",
    }


def test_the_other_commands_read_it(models, tmp_path, capsys):
    hf = models("llama")
    adapter = write_adapter(tmp_path / "adapter", hf, dense_adapter())
    other = write_adapter(tmp_path / "other", hf, dense_adapter(), ranks=2)
    assert main(["diff", str(adapter), str(other), "--base", str(hf)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(adapter), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["adapter"]
    assert (facts["rank"], facts["alpha"], facts["scale"]) == (RANK, ALPHA, SCALE)
    assert main(["inspect", str(adapter), "--base", str(hf)]) == 0
    assert "attn.q_proj" in capsys.readouterr().out


def test_what_does_not_fit_is_told_by_megatrons_names(models, tmp_path):
    hf, tensors = models("llama"), dense_adapter()
    name = "decoder.layers.1.mlp.linear_fc2.adapter.linear_out.weight"
    tensors[name] = tensors[name][:40]
    del tensors["decoder.layers.0.self_attention.linear_proj.adapter.linear_in.weight"]
    adapter = write_adapter(tmp_path / "adapter", hf, tensors)
    with pytest.raises(TensorMismatchError) as caught:
        open_adapter(adapter, find_model(hf).open())
    text = str(caught.value)
    assert f"{name}: [40, 8], expected [42, 8]" in text
    assert "layers.0.self_attention.linear_proj.adapter.linear_in.weight: missing" in text
    (adapter / "iter_0000012" / "run_config.yaml").unlink()
    with pytest.raises(ConfigError, match="rank and alpha are not known"):
        open_adapter(adapter, find_model(hf).open())


def test_what_megatron_bridge_has_no_form_for_is_refused(models, tmp_path):
    hf = models("llama")
    _, run = saved_run(hf, tmp_path / "run", AdapterConfig(4, 6, ("q_proj", "output")))
    with pytest.raises(ConfigError, match="no form for adapters on output_layer"):
        plan_adapter_conversion(run, "megatron")
    _, odd = saved_run(hf, tmp_path / "odd", AdapterConfig(3, 6, ("q_proj",)))
    with pytest.raises(ConfigError, match="does not divide the adapter's rank"):
        plan_adapter_conversion(odd, "megatron", parallel=Parallel(tensor=2))
    gemma = write_hf(tmp_path / "gemma", "gemma")
    _, run = saved_run(gemma, tmp_path / "other", AdapterConfig(4, 6, ("q_proj",)))
    with pytest.raises(ConfigError, match="Megatron's layout of gemma is not known"):
        plan_adapter_conversion(run, "megatron")
