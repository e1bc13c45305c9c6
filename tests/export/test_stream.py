"""Streams: what an engine gets is what the model computes with, and the model stays as it is."""

import gc
import json
import threading
import weakref
from itertools import pairwise

import pytest
import torch
import xxhash
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.adapters import MergedStateDict
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.export import adapter_stream, merged_stream, shared_window, stream
from checkpointing.export.stream import ChangedWeightsError
from checkpointing.nf4 import NF4Rounding
from checkpointing.training import adapter_state_dict, base_state_dict, build_decoder
from tests.export.live import ALL, KINDS, bits, live_model, nf4_model, shake, snapshot
from tests.families.variants import IN_FP64, VARIANTS, compared, tokens

IN_PEFT = ("llama", "qwen2", "phi3", "gemma2", "mixtral", "qwen3_moe", "llama_classifier")


def same_bits(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_computes_with_the_stream_what_the_model_computes(tmp_path, variant, kind):
    # In fp64, so that a difference is an error and not noise.
    model = live_model(tmp_path / "base", variant, KINDS[kind]).double()
    before = snapshot(model)
    names = load_file(tmp_path / "base" / "model.safetensors")
    found = dict(merged_stream(model))
    assert snapshot(model) == before
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in names.items()}
    (tmp_path / "merged").mkdir()
    save_file(found, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    (tmp_path / "merged" / "config.json").write_text((tmp_path / "base/config.json").read_text())
    peer = transformers_model(tmp_path / "merged", variant)
    base = transformers_model(tmp_path / "base", variant)
    with torch.no_grad():
        expected = model(tokens())
        assert compared(expected, peer(tokens()).logits).abs().max() < 1e-5
        assert compared(expected, base(tokens()).logits).abs().max() > 0.01


def transformers_model(directory, variant):
    is_classifier = "classifier" in VARIANTS[variant][0]
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float64, **IN_FP64).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", IN_PEFT)
def test_peft_computes_with_the_adapter_what_the_model_computes(tmp_path, variant, kind):
    model = live_model(tmp_path / "base", variant, KINDS[kind])
    before = snapshot(model)
    found = adapter_stream(model, tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    save_file(dict(found), tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(found.adapter_config))
    assert snapshot(model) == before
    peer = PeftModel.from_pretrained(
        transformers_model(tmp_path / "base", variant), tmp_path / "adapter"
    )
    with torch.no_grad():
        expected = model.double()(tokens())
        assert compared(expected, peer.double()(tokens()).logits).abs().max() < 1e-5


@pytest.fixture(params=[shared_window.FEW, 0], ids=["at once", "in threads"])
def few(request, monkeypatch):
    """So many bytes are computed without starting threads."""
    monkeypatch.setattr(shared_window, "FEW", request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_is_streamed(tmp_path, few, kind):
    """From a live model, and from the directories of its base and its adapter."""
    model = live_model(tmp_path / "base", "llama", KINDS[kind])
    adapter = adapter_state_dict(model)
    config = model.adapter_config
    state = {
        "model": MergedStateDict(base_state_dict(model), adapter, config),
        "adapter": adapter,
        "adapter_config": config.to_state(),
    }
    saver = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    saved = saver.save_checkpoint(state, epoch=0)
    on_disk = load_file(saved / "merged" / "model-00001-of-00001.safetensors")
    live, stored = merged_stream(model, version=3), merged_stream(tmp_path / "base", saved)
    found = dict(live)
    same_bits(found, {name: on_disk[name] for name in found})
    same_bits(dict(stored), {name: on_disk[name] for name in stored.metas})
    assert live.digests == {n: xxhash.xxh3_64_hexdigest(bits(t)) for n, t in on_disk.items()}
    assert stored.digests == live.digests
    assert (live.version, stored.version) == (3, 0)
    peft = load_file(saved / "adapter_model.safetensors")
    live, stored = adapter_stream(model, str(tmp_path / "base")), adapter_stream(saved)
    found = dict(live)
    same_bits(found, {name: peft[name] for name in found})
    assert dict(stored).keys() == found.keys() and stored.digests == live.digests
    assert live.adapter_config == json.loads((saved / "adapter_config.json").read_text())
    assert stored.adapter_config["target_modules"] == live.adapter_config["target_modules"]


def test_a_model_without_an_adapter_is_streamed_as_it_is(tmp_path):
    live_model(tmp_path)
    checkpointer = FullModelHFCheckpointer(tmp_path)
    weights = checkpointer.load_checkpoint()["model"]
    model = build_decoder(checkpointer.model_config, weights, torch.float32)
    expected = load_file(tmp_path / "model.safetensors")
    for found in (merged_stream(model), merged_stream(tmp_path)):
        tensors = dict(found)
        same_bits(tensors, {name: expected[name] for name in tensors})
        assert set(tensors) == set(expected) and found.survival is None
    with pytest.raises(ConfigError, match="no adapter"):
        adapter_stream(model, tmp_path)


def test_the_base_is_the_same_after_a_thousand_exports(tmp_path):
    model = live_model(tmp_path, "llama", AdapterConfig(2, 3, ("q_proj", "w2")), torch.bfloat16)
    base = {name: bits(tensor) for name, tensor in base_state_dict(model).items()}
    first = None
    for number in range(1000):
        shake(model, number % 10)
        with merged_stream(model, version=number, digests=number % 10 == 0) as found:
            for _ in found:
                pass
        if number % 10 == 0:
            first = first or found.digests
            assert found.digests == first
    assert {name: bits(tensor) for name, tensor in base_state_dict(model).items()} == base


def test_what_was_handed_out_stays_right_whatever_becomes_of_the_model(tmp_path):
    model = live_model(tmp_path, "llama, tied")
    expected = {name: bits(tensor) for name, tensor in merged_stream(model)}
    with merged_stream(model, tied_head=True) as found:
        kept = dict(found)
    head = kept.pop("lm_head.weight")
    assert bits(head) == expected["model.embed_tokens.weight"]
    memory = [t.untyped_storage().data_ptr() for t in (*kept.values(), head)]
    assert len(set(memory)) == len(memory)
    assert not set(memory) & {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert {name: bits(tensor) for name, tensor in kept.items()} == expected
    # And the reader may write into what it got.
    before = snapshot(model)
    for tensor in kept.values():
        tensor.zero_()
    assert snapshot(model) == before


def test_tensors_from_files_are_not_views_of_them(tmp_path):
    live_model(tmp_path)
    kept = dict(merged_stream(tmp_path))
    expected = {name: bits(tensor) for name, tensor in kept.items()}
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert {name: bits(tensor) for name, tensor in kept.items()} == expected


@pytest.fixture
def small_window(monkeypatch):
    monkeypatch.setattr(stream, "_WINDOW", 20_000)


def test_a_few_tensors_are_in_memory_at_a_time(tmp_path, small_window):
    model = live_model(tmp_path)
    alive = []
    largest = 131 * 42 * 4
    found = merged_stream(model)
    for _, tensor in found:
        alive.append((weakref.ref(tensor), tensor.nbytes))
        del tensor
        assert sum(nbytes for ref, nbytes in alive if ref() is not None) <= max(20_000, largest)
    assert found.nbytes > 10 * largest


@pytest.mark.parametrize("end", ["break", "raise", "close", "forget"])
def test_a_reader_that_stops_early_leaves_nothing_behind(tmp_path, small_window, end):
    model = live_model(tmp_path)
    before, threads = snapshot(model), threading.active_count()
    seen = []

    def read():
        with merged_stream(model) as found:
            for name, tensor in found:
                seen.append(weakref.ref(tensor))
                if len(seen) == 4:
                    if end == "raise":
                        raise KeyError(name)
                    if end == "close":
                        found.close()
                        assert list(found) == []
                    if end == "forget":
                        del found
                    return

    if end == "raise":
        with pytest.raises(KeyError):
            read()
    else:
        read()
    gc.collect()
    assert all(ref() is None for ref in seen)
    assert snapshot(model) == before and threading.active_count() == threads
    assert len(dict(merged_stream(model))) > 10


def test_buckets_hold_as_much_as_fits_and_an_adapter_is_never_divided(tmp_path):
    model = live_model(tmp_path)
    whole = dict(merged_stream(model))
    found = merged_stream(model)
    buckets = list(found.buckets(30_000))
    assert found.is_complete and len(buckets) > 3
    same_bits({name: tensor for bucket in buckets for name, tensor in bucket}, whole)
    sizes = [[tensor.nbytes for _, tensor in bucket] for bucket in buckets]
    assert all(sum(some) <= 30_000 or len(some) == 1 for some in sizes)
    assert all(sum(some) + following[0] > 30_000 for some, following in pairwise(sizes))
    adapter = adapter_stream(model, tmp_path)
    (only,) = adapter.buckets(1)
    assert len(only) == len(adapter.metas) > 10


PROBLEMS = {
    "missing": ({"model.norm.bias": (42,)}, (), r"model\.norm\.bias: the engine expects it"),
    "unknown": ({}, ("model.norm.weight",), r"model\.norm\.weight: the engine has none"),
    "shape": (
        {"model.norm.weight": (43,)},
        (),
        r"model\.norm\.weight: \[42\], and the engine's has \[43\]",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_another_engine_is_refused_before_the_first_tensor(tmp_path, monkeypatch, problem):
    more, without, message = PROBLEMS[problem]
    model = live_model(tmp_path)
    shapes = {name: meta.shape for name, meta in merged_stream(model).metas.items()}

    def fail(*arguments):
        pytest.fail("computed")

    monkeypatch.setattr(shared_window.OwnWindow, "fill", fail)
    expected = {n: s for n, s in (shapes | more).items() if n not in without}
    with pytest.raises(TensorMismatchError, match=message):
        merged_stream(model, expected=expected)
    merged_stream(model, expected=shapes)


@pytest.mark.parametrize("what", ["adapter", "base"])
def test_a_model_that_changes_under_the_stream_is_noticed(tmp_path, small_window, what):
    model = live_model(tmp_path)
    found = merged_stream(model)
    next(found)
    with torch.no_grad():
        (model.layers[2].attn.q_proj.lora_b.weight if what == "adapter" else model.norm.scale).mul_(
            2
        )
    with pytest.raises(ChangedWeightsError, match="before the next optimizer step"):
        dict(found)


def test_an_adapter_that_changes_under_its_stream_is_noticed(tmp_path, small_window):
    model = live_model(tmp_path)
    found = adapter_stream(model, tmp_path)
    next(found)
    trained = model.layers[2].attn.q_proj.lora_a.weight
    trained.grad = torch.ones_like(trained)
    torch.optim.SGD([trained], lr=0.1).step()
    with pytest.raises(ChangedWeightsError, match="before the next optimizer step"):
        dict(found)


def test_a_small_update_that_bf16_loses_is_reported(tmp_path, few):
    config = AdapterConfig(4, 4, ALL)
    model = live_model(tmp_path, "llama", config, torch.bfloat16)
    with torch.no_grad():
        for name, tensor in adapter_state_dict(model).items():
            if name.endswith("lora_b.weight"):
                tensor.mul_(0.01)
    changed = updated = 0
    lost = norm = 0.0
    for layer in model.layers:
        for module in (*layer.attn.children(), *layer.mlp.children()):
            if hasattr(module, "lora_a"):
                w = module.weight.double()
                u = (module.lora_b.weight.double() @ module.lora_a.weight.double()).detach()
                m = (w + u).float().bfloat16().double()
                changed += int((m != w).sum())
                updated += int((u != 0).sum())
                lost += float((m - w - u).square().sum())
                norm += float(u.square().sum())
    found = merged_stream(model)
    dict(found)
    assert 0.1 < changed / updated < 0.9
    # Of the rows of this model, which are few, all are measured.
    assert found.survival.changed_share == pytest.approx(changed / updated, abs=0.02)
    assert found.survival.lost_norm == pytest.approx((lost / norm) ** 0.5, rel=0.05)
    assert (
        "adapter_stream" in found.report() and f"{found.survival.lost_norm:.1%}" in found.report()
    )
    wide = merged_stream(live_model(tmp_path / "fp32", "llama", config))
    dict(wide)
    assert "adapter_stream" not in wide.report()
    assert wide.survival.changed_share > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_is_rounded_once(tmp_path, dtype):
    model = live_model(tmp_path)
    wide = dict(merged_stream(model))
    found = dict(merged_stream(model, dtype=dtype))
    same_bits(found, {name: tensor.to(dtype) for name, tensor in wide.items()})


def test_a_base_in_nf4_gives_the_numbers_that_it_stands_for(tmp_path):
    model = nf4_model(tmp_path, ("v_proj", "w1"))
    assert "rounded to NF4" in adapter_stream(model, tmp_path).report()
    found = dict(merged_stream(model))
    for number, layer in enumerate(model.layers):
        for module, name in (
            (layer.attn.v_proj, "self_attn.v_proj"),
            (layer.mlp.w1, "mlp.gate_proj"),
        ):
            w = module.weight.to(torch.float32).double()
            u = 1.5 * module.lora_b.weight.double() @ module.lora_a.weight.double()
            difference = found[f"model.layers.{number}.{name}.weight"].double() - (w + u)
            assert difference.abs().max() < 1e-6
        plain = found[f"model.layers.{number}.self_attn.o_proj.weight"]
        assert torch.equal(plain, layer.attn.output_proj.weight.to(torch.float32))


def test_an_adapter_from_a_checkpoint_of_qlora_says_what_its_base_was(tmp_path):
    model = live_model(tmp_path / "base", "llama", AdapterConfig(4, 6, ("q_proj", "v_proj")))
    saver = FullModelHFCheckpointer(tmp_path / "base", output_dir=tmp_path / "out")
    state = {
        "adapter": adapter_state_dict(model),
        "adapter_config": model.adapter_config.to_state(),
        "quantized_base": NF4Rounding(torch.float32).to_state(),
    }
    saved = saver.save_checkpoint(state, epoch=0, adapter_only=True)
    found = adapter_stream(saved)
    dict(found)
    assert "rounded to NF4" in found.report()


def test_a_live_model_has_its_own_adapter(tmp_path):
    model = live_model(tmp_path)
    with pytest.raises(ConfigError, match="its own adapter"):
        merged_stream(model, tmp_path)
    with pytest.raises(ConfigError, match="base: give"):
        adapter_stream(model)
