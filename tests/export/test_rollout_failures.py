"""What goes wrong when weights go from a trainer to an engine, and must not here.

The right values are calculated by hand, or are those of transformers and PEFT.
"""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from checkpointing import AdapterConfig
from checkpointing.adapters import MergedStateDict
from checkpointing.errors import CheckpointingError, TensorMismatchError
from checkpointing.export import adapter_stream, merged, merged_stream
from checkpointing.export.engines import sync
from checkpointing.export.engines.transformers_engine import TransformersEngine
from checkpointing.training import adapter_state_dict
from tests.export.live import ALL, KINDS, bits, live_model, shake, snapshot
from tests.families.variants import SIZES, random_model, tokens

# Modules whose rows lie in the same order in both layouts.
SAME_ROWS = {
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "mlp.w1",
    "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3",
}


def peer_of(base, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def logprobs_of(model):
    with torch.no_grad():
        values = model(tokens())[:, :-1].log_softmax(-1)
    return values.gather(-1, tokens()[:, 1:, None])[..., 0]


# A merged weight that rounds a small update away, and a base that drifts.


def test_bf16_loses_two_thirds_of_a_small_update_and_the_report_says_so(tmp_path):
    model = live_model(tmp_path, "llama", AdapterConfig(16, 32, ALL), torch.bfloat16)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "lora_a"):
                update = 2 * module.lora_b.weight @ module.lora_a.weight
                module.lora_b.weight.mul_(1.6e-3 * module.weight.float().norm() / update.norm())
    base = load_file(tmp_path / "model.safetensors")
    found = merged_stream(model)
    same = total = 0
    for name, tensor in found:
        if name.endswith("_proj.weight"):
            same += int((tensor == base[name].bfloat16()).sum())
            total += tensor.numel()
    # Of an element w of N(0, s), and an update of N(0, 1.6e-3 s), half a step of bf16 at w is
    # more than the update with a probability of 0.66 (integrated over w).
    assert same / total == pytest.approx(0.66, abs=0.04)
    assert found.survival.changed_share == pytest.approx(1 - same / total, abs=0.02)
    assert f"{found.survival.changed_share:.1%} differ" in found.report()
    assert "adapter_stream" in found.report()
    alone = dict(adapter_stream(model, tmp_path))
    for number, layer in enumerate(model.layers):
        for theirs, ours in SAME_ROWS.items():
            key = f"base_model.model.model.layers.{number}.{theirs}.lora_B.weight"
            assert torch.equal(alone[key], layer.get_submodule(ours).lora_b.weight)


def test_a_base_that_is_merged_into_and_unmerged_drifts_and_ours_does_not(tmp_path):
    config = AdapterConfig(4, 6, ("v_proj", "w2"))
    model = live_model(tmp_path, "llama", config, torch.bfloat16)
    before = snapshot(model)
    names = LoraConfig(r=4, lora_alpha=6, target_modules=["v_proj", "down_proj"])
    peer = get_peft_model(peer_of(tmp_path, torch.bfloat16), names)
    weights = {n: p for n, p in peer.named_parameters() if "base_layer" in n}
    own = {name: weight.clone() for name, weight in weights.items()}
    for number in range(20):
        shake(model, number)
        with torch.no_grad():
            for name, tensor in dict(adapter_stream(model, tmp_path, form="exact")).items():
                peer.get_parameter(name.replace(".weight", ".default.weight")).copy_(tensor)
        peer.merge_adapter()
        peer.unmerge_adapter()
        for _ in merged_stream(model, digests=False):
            pass
        with merged(model):
            pass
    changed = sum(int((weight != own[name]).sum()) for name, weight in weights.items())
    assert changed / sum(weight.numel() for weight in own.values()) > 0.3
    adapter = adapter_state_dict(model)
    after = snapshot(model)
    assert {n: b for n, b in after.items() if n not in adapter} == {
        n: b for n, b in before.items() if n not in adapter
    }


# Tensors that are the base's again when the engine reads them.


def test_tensors_handed_out_stay_merged_after_the_stream_is_closed(tmp_path):
    model = live_model(tmp_path)
    expected = {}
    for number, layer in enumerate(model.layers):
        for theirs, ours in SAME_ROWS.items():
            module = layer.get_submodule(ours)
            update = module.lora_b.weight.double() @ module.lora_a.weight.double()
            expected[f"model.layers.{number}.{theirs}.weight"] = module.weight + 6 / 4 * update
    with merged_stream(model) as found:
        kept = [next(found) for _ in range(len(found.metas) - 3)]
    with merged(model):
        in_place = dict(model.named_parameters())
    shake(model, 9)
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.w2.weight.zero_()
    compared = 0
    for name, tensor in kept:
        if name in expected:
            assert (tensor - expected[name]).abs().max() < 1e-6
            compared += 1
    assert compared > 10
    for theirs, ours in SAME_ROWS.items():
        difference = (
            in_place[f"layers.2.{ours}.weight"] - expected[f"model.layers.2.{theirs}.weight"]
        )
        assert difference.abs().max() < 1e-6


# An adapter that belongs to another model.


def renamed_adapter(model, base, directory):
    """A PEFT adapter of which no name is one of the base's."""
    found = adapter_stream(model, base)
    tensors = {name.replace("model.layers", "transformer.h"): t for name, t in found}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(found.adapter_config))
    return directory, len(tensors)


def test_an_adapter_whose_names_match_nothing_is_refused(tmp_path):
    base = tmp_path / "base"
    adapter, count = renamed_adapter(live_model(base), base, tmp_path / "adapter")
    for stream in (lambda: merged_stream(base, adapter), lambda: adapter_stream(adapter, base)):
        with pytest.raises(TensorMismatchError) as caught:
            stream()
        assert sum("transformer.h" in problem for problem in caught.value.problems) == count


OTHER_BASES = {
    "other names": ("gpt2", {"n_embd": 42, "n_head": 6, "n_layer": 3, "vocab_size": 131}),
    "a layer less": ("llama", {**SIZES, "num_hidden_layers": 2}),
    "a layer more": ("llama", {**SIZES, "num_hidden_layers": 4}),
    "another size": ("llama", {**SIZES, "intermediate_size": 64}),
}


@pytest.mark.parametrize("way", ["adapter", "merged"])
@pytest.mark.parametrize("other", OTHER_BASES)
def test_an_engine_with_another_base_refuses_and_goes_on_with_its_own(tmp_path, other, way):
    model = live_model(tmp_path)
    before = snapshot(model)
    engine = TransformersEngine(random_model(*OTHER_BASES[other]))
    shapes, own = engine.expected(), engine.logprobs(tokens().tolist())
    with pytest.raises(CheckpointingError):
        sync(model, engine, way, 0, tmp_path)
    assert engine.version == -1 and engine.expected() == shapes
    after = engine.logprobs(tokens().tolist())
    assert all(torch.equal(a, b) for a, b in zip(own, after, strict=True))
    assert snapshot(model) == before


# Scales and magnitudes that get lost on the way.

DOWN = "layers.1.mlp.w2"
# With B A = 1: 32 / 16; 32 / sqrt(16); 64 / 16; 32 / 4; 64 / sqrt(4).
SCALES = {
    "alpha over r": (AdapterConfig(16, 32, ("w2",)), 2.0),
    "rsLoRA": (AdapterConfig(16, 32, ("w2",), use_rslora=True), 8.0),
    "an alpha pattern": (AdapterConfig(16, 32, ("w2",), alpha_pattern={DOWN: 64}), 4.0),
    "a rank pattern": (AdapterConfig(16, 32, ("w2",), rank_pattern={DOWN: 4}), 8.0),
    "all of them": (
        AdapterConfig(
            16, 32, ("w2",), use_rslora=True, rank_pattern={DOWN: 4}, alpha_pattern={DOWN: 64}
        ),
        32.0,
    ),
}


@pytest.mark.parametrize("form", ["portable", "exact"])
@pytest.mark.parametrize("kind", SCALES)
def test_the_scale_reaches_every_engine(tmp_path, kind, form):
    config, scale = SCALES[kind]
    model = live_model(tmp_path, "llama", config)
    module = model.get_submodule(DOWN)
    with torch.no_grad():
        module.weight.fill_(3.0)
        module.lora_a.weight.zero_()[0] = 1.0
        module.lora_b.weight.fill_(1.0)
    weight = dict(merged_stream(model))["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(weight, torch.full((42, 56), 3.0 + scale))

    found = adapter_stream(model, tmp_path, form=form)
    tensors, fields = dict(found), found.adapter_config
    if form == "portable":
        # As engines compute it, which know neither rsLoRA nor patterns.
        key = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
        update = tensors[key.format("B")] @ tensors[key.format("A")]
        torch.testing.assert_close(
            fields["lora_alpha"] / fields["r"] * update, torch.full((42, 56), scale)
        )
    peer = peer_of(tmp_path)
    TransformersEngine(peer).load_adapter(adapter_stream(model, tmp_path, form=form))
    adapted = peer.model.layers[1].mlp.down_proj
    update = adapted.get_delta_weight(adapted.active_adapters[0])
    torch.testing.assert_close(update, torch.full((42, 56), scale))


def test_a_row_of_3_and_4_with_a_magnitude_of_10_is_6_and_8(tmp_path):
    gate = "layers.1.mlp.w1"
    config = AdapterConfig(1, 2, ("w1",), use_dora=True)
    adapter = {
        f"{gate}.lora_a.weight": torch.zeros(1, 2),
        f"{gate}.lora_b.weight": torch.ones(1, 1),
        f"{gate}.magnitude": torch.tensor([10.0]),
    }
    alone = MergedStateDict({f"{gate}.weight": torch.tensor([[3.0, 4.0]])}, adapter, config)
    assert alone[f"{gate}.weight"].tolist() == [[6.0, 8.0]]

    model = live_model(tmp_path, "llama", config)
    peer = peer_of(tmp_path)
    module, theirs = model.get_submodule(gate), peer.model.layers[1].mlp.gate_proj
    rows = torch.arange(1.0, 57)
    weight = torch.zeros(56, 42)
    weight[:, :2] = torch.tensor([3.0, 4.0])
    with torch.no_grad():
        module.weight.copy_(weight)
        module.lora_a.weight.zero_()
        module.magnitude.copy_(10 * rows)
        theirs.weight.copy_(weight)
    expected = torch.zeros(56, 42)
    expected[:, :2] = rows[:, None] * torch.tensor([6.0, 8.0])
    found = dict(merged_stream(model))
    assert torch.equal(found["model.layers.1.mlp.gate_proj.weight"], expected)

    alone = adapter_stream(model, tmp_path)
    assert alone.adapter_config["use_dora"] is True
    assert "DoRA" in alone.report() and "merged" in alone.report()
    engine = TransformersEngine(peer)
    engine.load_adapter(alone)
    adapted = peer.model.layers[1].mlp.gate_proj
    adapted.merge()
    torch.testing.assert_close(adapted.get_base_layer().weight, expected)


# An engine that fails in the middle.


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_middle_of_a_sync_leaves_the_model_as_it_was(tmp_path, kind):
    model = live_model(tmp_path, "llama", KINDS[kind])
    before, expected = snapshot(model), logprobs_of(model)
    peer = peer_of(tmp_path)
    # All its elements share one place in memory, so that nothing can be copied into it.
    projection = peer.model.layers[1].mlp.up_proj
    whole = projection.weight
    projection.weight = nn.Parameter(torch.zeros(1, 1).expand(whole.shape), requires_grad=False)
    first, last = (bits(peer.model.layers[n].self_attn.q_proj.weight) for n in (0, 2))
    engine = TransformersEngine(peer)
    with pytest.raises(RuntimeError, match="single memory location"):
        sync(model, engine, "merged", 0)
    assert bits(peer.model.layers[0].self_attn.q_proj.weight) != first
    assert bits(peer.model.layers[2].self_attn.q_proj.weight) == last
    assert engine.version == -1
    assert snapshot(model) == before and torch.equal(logprobs_of(model), expected)
    projection.weight = whole
    sync(model, engine, "merged", 0)
    found = torch.stack(engine.logprobs(tokens().tolist()))
    assert (found - expected).abs().max() < 1e-5
