"""Loading all of a model: as a dictionary, and into tensors that are there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpointing import FullModelHFCheckpointer, FullModelTorchTuneCheckpointer
from checkpointing.errors import CorruptCheckpointError, TensorMismatchError
from checkpointing.storage.threads import THREADS_VARIABLE
from tests.families import variants
from tests.test_checkpointers import ADAPTER, CLASSES, CONFIG, make, write_base
from tests.tiny import assert_same_tensors, random_adapter

_ROOT = Path(__file__).resolve().parents[1]


def like(weights, dtype=None):
    """Tensors of the same shapes that hold something else."""
    return {name: torch.full_like(t, 9, dtype=dtype) for name, t in weights.items()}


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("variant", ["llama", "phi3", "qwen3_moe"])
def test_what_is_loaded_into_tensors_is_what_is_loaded(tmp_path, monkeypatch, variant, threads):
    monkeypatch.setenv(THREADS_VARIABLE, threads)
    variants.write(variant, tmp_path / "base")
    weights = FullModelHFCheckpointer(tmp_path / "base").load_checkpoint()["model"]
    targets = like(weights)
    assert FullModelHFCheckpointer(tmp_path / "base").load_into(targets) == {}
    assert_same_tensors(targets, weights)


@pytest.mark.parametrize("name", CLASSES)
def test_every_format_loads_into_parameters_of_another_dtype(tmp_path, name):
    expected = write_base(tmp_path / "base", name)
    module = torch.nn.ParameterDict(
        {key.replace(".", "/"): t for key, t in like(expected, torch.bfloat16).items()}
    )
    parameters = {key.replace("/", "."): value for key, value in module.items()}
    make(name, tmp_path / "base").load_into(parameters)
    assert all(parameter.requires_grad for parameter in parameters.values())
    found = {key: parameter.detach() for key, parameter in parameters.items()}
    assert_same_tensors(found, {key: t.to(torch.bfloat16) for key, t in expected.items()})


def test_rows_that_are_not_beside_each_other_are_loaded_into(tmp_path):
    expected = write_base(tmp_path / "base", "hf")
    weights = FullModelHFCheckpointer(tmp_path / "base").load_checkpoint()["model"]
    targets = {
        name: torch.full_like(t.T, 9).T if t.dim() == 2 else torch.full_like(t, 9)
        for name, t in weights.items()
    }
    FullModelHFCheckpointer(tmp_path / "base").load_into(targets)
    assert_same_tensors(targets, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_a_resumed_run_gives_what_is_beside_the_weights_too(tmp_path, name):
    base = tmp_path / "base"
    weights = write_base(base, name)
    saved = {key: t + 1 for key, t in weights.items()}
    make(name, base).save_checkpoint({"model": saved, "steps_run": 3}, epoch=0, step=3)
    targets = like(weights)
    state = make(name, base, should_load_recipe_state=True).load_into(targets)
    assert state == {"steps_run": 3}
    assert_same_tensors(targets, saved)


def test_a_resumed_adapter_run_loads_the_base(tmp_path):
    base = tmp_path / "base"
    weights = write_base(base, "hf")
    adapter = random_adapter(CONFIG.dims, ADAPTER)
    state = {"adapter": adapter, "adapter_config": ADAPTER.to_state(), "steps_run": 3}
    make("hf", base).save_checkpoint(state, epoch=0, adapter_only=True)
    targets = like(weights)
    found = make("hf", base, should_load_recipe_state=True).load_into(targets)
    assert_same_tensors(targets, weights)
    assert_same_tensors(found["adapter"], adapter)
    assert set(found) == {"adapter", "adapter_config", "steps_run"}


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed(tmp_path):
    weights = write_base(tmp_path / "base", "hf")
    targets = like(weights)
    del targets["norm.scale"]
    targets["extra"] = torch.full((2,), 9.0)
    narrow = targets["tok_embeddings.weight"] = targets["tok_embeddings.weight"][:-1]
    targets["layers.0.sa_norm.scale"] = targets["layers.0.sa_norm.scale"].long()
    targets["layers.1.sa_norm.scale"] = targets["layers.1.sa_norm.scale"].to("meta")
    with pytest.raises(TensorMismatchError) as caught:
        make("hf", tmp_path / "base").load_into(targets)
    said = "\n".join(sorted(caught.value.problems))
    rows = weights["tok_embeddings.weight"].shape[0]
    for problem in (
        "extra: unexpected, [2]",
        "layers.0.sa_norm.scale: torch.int64 cannot hold what is torch.float32",
        "layers.1.sa_norm.scale: has no memory",
        "norm.scale: nothing to load it into",
        f"tok_embeddings.weight: {list(narrow.shape)}, expected [{rows}, {narrow.shape[1]}]",
    ):
        assert problem in said
    assert len(caught.value.problems) == 5
    for name, target in targets.items():
        assert target.is_meta or bool((target == 9).all()), name


def test_a_write_into_a_loaded_tensor_changes_no_file(tmp_path):
    write_base(tmp_path / "base", "hf")
    file = tmp_path / "base" / "model.safetensors"
    before = file.read_bytes()
    weights = FullModelHFCheckpointer(tmp_path / "base").load_checkpoint()["model"]
    for tensor in weights.values():
        tensor.fill_(7)
    assert file.read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file is read when it is used")
def test_a_file_that_was_cut_off_after_it_was_opened_is_named_as_damaged(tmp_path):
    weights = {"w": torch.ones(1 << 20), "b": torch.ones(1 << 20)}
    save_file(weights, tmp_path / "model.safetensors")
    checkpointer = FullModelTorchTuneCheckpointer(tmp_path)
    shapes = {name: meta.shape for name, meta in checkpointer._base.native.metas.items()}
    assert shapes == {"w": (1 << 20,), "b": (1 << 20,)}
    os.truncate(tmp_path / "model.safetensors", 1 << 20)
    with pytest.raises(CorruptCheckpointError, match=r"(w|b): its file cannot be read to the end"):
        checkpointer.load_checkpoint()


def write_large_hf(directory):
    """A Llama-shaped bf16 model of 150 MB, which transformers did not write."""
    hidden, ffn, vocab, layers = 1024, 576, 4096, 5
    heads, kv_heads, head_dim = 64, 32, 64
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, ffn),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    directory.mkdir()
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (directory / "config.json").write_text(json.dumps(config))


# What loading takes of memory that is no file's.
_MEASURE = """
import gc, sys
import torch
from checkpointing import FullModelHFCheckpointer

def private():
    gc.collect()
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

def peak_while(call):
    import threading
    done, peak = threading.Event(), [private()]
    def watch():
        while not done.wait(0.002):
            for line in open("/proc/self/smaps_rollup"):
                if line.startswith("Anonymous:"):
                    peak.append(int(line.split()[1]) * 1024)
    thread = threading.Thread(target=watch)
    thread.start()
    kept = call()
    done.set()
    thread.join()
    return max(peak), kept

tiny, large, way = sys.argv[1:]
checkpointer = FullModelHFCheckpointer(large)
metas = checkpointer._base.native.metas
targets = {name: torch.full(meta.shape, 9, dtype=meta.dtype) for name, meta in metas.items()}
# Once before, for what is only taken once: threads, and their stacks.
small = FullModelHFCheckpointer(tiny)
metas_of_small = small._base.native.metas
small.load_into({n: torch.empty(meta.shape) for n, meta in metas_of_small.items()})
before = private()
load = checkpointer.load_checkpoint if way == "dict" else lambda: checkpointer.load_into(targets)
peak, kept = peak_while(load)
print(peak - before, sum(meta.nbytes for meta in metas.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what memory is private")
@pytest.mark.parametrize(("way", "most"), [("into", 0.1), ("dict", 0.5)])
def test_loading_takes_little_memory_of_its_own(tmp_path, way, most):
    # The queries and keys, whose rows get another order, are 0.42 of this model.
    write_large_hf(tmp_path / "large")
    write_base(tmp_path / "tiny", "hf")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path / "tiny", tmp_path / "large", way],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=_ROOT,
        env={**os.environ, THREADS_VARIABLE: "2"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    taken, model = map(int, done.stdout.split())
    assert model > 140_000_000
    assert taken < most * model
