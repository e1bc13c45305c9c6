"""Plans of models of which no byte can be read here: headers alone, and files full of holes."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RANK = 16
SHARD_BYTES = 4_600_000_000
MOST_MEMORY = 200 * 10**6
MOST_READ = 64 * 10**6

Shape = tuple[int, ...]
Shapes = Iterable[tuple[str, Shape]]

# What is planned, in a process of its own: its memory, and what it reads, are that of the plans.
PLANS = """
import json, resource, sys, time
from checkpointing import FullModelHFCheckpointer
from checkpointing.convert import plan_conversion
from checkpointing.merge import plan_merge

def read():
    lines = open("/proc/self/io").read().split("\\n")
    return int(lines[0].removeprefix("rchar: "))

def load(directory):
    FullModelHFCheckpointer(directory).model_config

def convert(directory, to):
    return plan_conversion(directory, to).tensors.metas

def merge(directory, adapter):
    return plan_merge(directory, adapter).plan.tensors.metas

peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_before = read()
seconds, tensors = {}, {}
for plan, *arguments in json.loads(sys.argv[1]):
    started = time.perf_counter()
    metas = globals()[plan](*arguments) or {}
    name = f"{plan} {arguments[1].rsplit('/', 1)[-1] if arguments[1:] else ''}".strip()
    seconds[name] = time.perf_counter() - started
    tensors[name] = metas
memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
read_bytes = read() - read_before
listed = {
    plan: {name: [list(meta.shape), str(meta.dtype)] for name, meta in metas.items()}
    for plan, metas in tensors.items()
}
json.dump({"seconds": seconds, "memory": memory, "read": read_bytes, "tensors": listed}, sys.stdout)
"""


@dataclass(frozen=True)
class Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int = 0


LLAMA_70B = Sizes(80, 8192, 64, 8, 28672, 128256)
LLAMA_405B = Sizes(126, 16384, 128, 8, 53248, 128256)
QWEN3_235B = Sizes(94, 4096, 64, 4, 1536, 151936, experts=128)
HEAD_DIM = 128


def hf_shapes(sizes: Sizes) -> Iterator[tuple[str, Shape]]:
    """As the releases list them."""
    hidden, ffn = sizes.hidden, sizes.ffn
    query, key_value = sizes.heads * HEAD_DIM, sizes.kv_heads * HEAD_DIM
    yield "model.embed_tokens.weight", (sizes.vocab, hidden)
    for number in range(sizes.layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (query, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (key_value, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (key_value, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        blocks = [f"{layer}.mlp"]
        if sizes.experts:
            yield f"{layer}.self_attn.q_norm.weight", (HEAD_DIM,)
            yield f"{layer}.self_attn.k_norm.weight", (HEAD_DIM,)
            yield f"{layer}.mlp.gate.weight", (sizes.experts, hidden)
            blocks = [f"{layer}.mlp.experts.{expert}" for expert in range(sizes.experts)]
        for block in blocks:
            yield f"{block}.gate_proj.weight", (ffn, hidden)
            yield f"{block}.up_proj.weight", (ffn, hidden)
            yield f"{block}.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (sizes.vocab, hidden)


def meta_shapes(sizes: Sizes, ranks: int) -> Iterator[tuple[str, Shape]]:
    """Of one rank; the vocabulary, the heads and the feed-forward width are cut."""
    hidden, ffn = sizes.hidden, sizes.ffn // ranks
    query, key_value = sizes.heads * HEAD_DIM // ranks, sizes.kv_heads * HEAD_DIM // ranks
    yield "tok_embeddings.weight", (sizes.vocab // ranks, hidden)
    for number in range(sizes.layers):
        layer = f"layers.{number}"
        yield f"{layer}.attention.wq.weight", (query, hidden)
        yield f"{layer}.attention.wk.weight", (key_value, hidden)
        yield f"{layer}.attention.wv.weight", (key_value, hidden)
        yield f"{layer}.attention.wo.weight", (hidden, query)
        yield f"{layer}.feed_forward.w1.weight", (ffn, hidden)
        yield f"{layer}.feed_forward.w2.weight", (hidden, ffn)
        yield f"{layer}.feed_forward.w3.weight", (ffn, hidden)
        yield f"{layer}.attention_norm.weight", (hidden,)
        yield f"{layer}.ffn_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    yield "output.weight", (sizes.vocab // ranks, hidden)


def adapter_shapes(sizes: Sizes) -> Iterator[tuple[str, Shape]]:
    for name, shape in hf_shapes(sizes):
        if "_proj." in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            yield f"{module}.lora_A.weight", (RANK, shape[1])
            yield f"{module}.lora_B.weight", (shape[0], RANK)


def nbytes(shape: Shape) -> int:
    count = 2
    for size in shape:
        count *= size
    return count


def write_holes(path: Path, shapes: Shapes) -> dict[str, int]:
    """A bfloat16 file with a header and no data; returns where each tensor begins."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes:
        begin, end = end, end + nbytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in header.items()}


def write_hf(directory: Path, sizes: Sizes) -> Path:
    directory.mkdir()
    shards: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in hf_shapes(sizes):
        if filled + nbytes(shape) > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += nbytes(shape)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_holes(directory / file, shard.items())
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": False,
    }
    if sizes.experts:
        config |= {
            "model_type": "qwen3_moe",
            "intermediate_size": 12288,
            "moe_intermediate_size": sizes.ffn,
            "num_experts": sizes.experts,
            "num_experts_per_tok": 8,
        }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_meta(directory: Path, sizes: Sizes, ranks: int) -> Path:
    directory.mkdir()
    for rank in range(ranks):
        path = directory / f"consolidated.{rank:02d}.safetensors"
        begins = write_holes(path, meta_shapes(sizes, ranks))
        if rank == 0:
            # The head must differ from the embedding, in a row that is looked at first.
            with path.open("rb+") as file:
                file.seek(begins["output.weight"])
                file.write(b"\x80\x3f")
    params = {
        "dim": sizes.hidden,
        "n_layers": sizes.layers,
        "n_heads": sizes.heads,
        "n_kv_heads": sizes.kv_heads,
        "vocab_size": sizes.vocab,
    }
    (directory / "params.json").write_text(json.dumps(params))
    return directory


def write_adapter(directory: Path, sizes: Sizes) -> Path:
    directory.mkdir()
    write_holes(directory / "adapter_model.safetensors", adapter_shapes(sizes))
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 32,
        "target_modules": "all-linear",
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def blocks(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_blocks for path in sorted(directory.rglob("*.safetensors"))}


def plan(capsys: pytest.CaptureFixture[str], directory: Path, *plans: list[str]) -> dict[str, Any]:
    """Makes plans in a new process, and checks what they cost."""
    before = blocks(directory)
    command = [sys.executable, "-c", PLANS, json.dumps(plans)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    with capsys.disabled():
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["seconds"].items())
        print(f"\n{times}; {found['memory'] / 1e6:.0f} MB, read {found['read'] / 1e6:.0f} MB")
    assert found["memory"] < MOST_MEMORY
    assert found["read"] < MOST_READ
    assert blocks(directory) == before
    return found["tensors"]


def total(tensors: dict[str, Any]) -> int:
    assert {dtype for _, dtype in tensors.values()} == {"torch.bfloat16"}
    return sum(nbytes(tuple(shape)) for shape, _ in tensors.values())


def shapes(tensors: dict[str, Any]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, (shape, _) in tensors.items()}


def test_llama_405b(tmp_path, capsys):
    base = str(write_hf(tmp_path / "base", LLAMA_405B))
    adapter = str(write_adapter(tmp_path / "adapter", LLAMA_405B))
    assert len(list(Path(base).glob("*.safetensors"))) > 150

    found = plan(
        capsys,
        tmp_path,
        ["load", base],
        ["convert", base, "tune"],
        ["convert", base, "meta"],
        ["merge", base, adapter],
    )

    # Of a layer: q and output, k and v, three of the feed-forward, two norms. 405 853 388 800
    # parameters, as Meta's model card counts them.
    layer = 2 * 16384 * 16384 + 2 * 1024 * 16384 + 3 * 53248 * 16384 + 2 * 16384
    parameters = 126 * layer + 2 * 128256 * 16384 + 16384
    assert parameters == 405_853_388_800
    assert [total(found[name]) for name in ("convert tune", "convert meta", "merge adapter")] == [
        2 * parameters
    ] * 3
    tune, meta = shapes(found["convert tune"]), shapes(found["convert meta"])
    assert len(tune) == len(meta) == 126 * 9 + 3
    assert tune["tok_embeddings.weight"] == (128256, 16384)
    assert tune["layers.125.attn.k_proj.weight"] == (1024, 16384)
    assert tune["layers.0.mlp.w2.weight"] == (16384, 53248)
    assert tune["layers.77.sa_norm.scale"] == (16384,)
    assert meta["layers.125.attention.wk.weight"] == (1024, 16384)
    assert meta["layers.9.feed_forward.w3.weight"] == (53248, 16384)
    assert shapes(found["merge adapter"]) == dict(hf_shapes(LLAMA_405B))


def test_llama_70b_of_meta(tmp_path, capsys):
    base = str(write_meta(tmp_path / "base", LLAMA_70B, ranks=8))

    found = plan(capsys, tmp_path, ["convert", base, "hf"], ["convert", base, "tune"])

    layer = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192 + 2 * 8192
    parameters = 80 * layer + 2 * 128256 * 8192 + 8192
    assert parameters == 70_553_706_496
    assert total(found["convert hf"]) == total(found["convert tune"]) == 2 * parameters
    assert shapes(found["convert hf"]) == dict(hf_shapes(LLAMA_70B))
    tune = shapes(found["convert tune"])
    assert tune["output.weight"] == (128256, 8192)
    assert tune["layers.79.attn.v_proj.weight"] == (1024, 8192)
    assert tune["layers.79.mlp.w1.weight"] == (28672, 8192)


def test_qwen3_235b_of_36_thousand_tensors(tmp_path, capsys):
    base = str(write_hf(tmp_path / "base", QWEN3_235B))
    adapter = str(write_adapter(tmp_path / "adapter", QWEN3_235B))

    found = plan(
        capsys, tmp_path, ["load", base], ["convert", base, "tune"], ["merge", base, adapter]
    )

    # q and output, k and v, 128 experts of three matrices, the router, the norms of the layer and
    # of the queries and keys. 235 093 634 560 parameters, as its index on the Hub counts them.
    attention = 2 * 8192 * 4096 + 2 * 512 * 4096 + 2 * 128
    layer = attention + 128 * 3 * 1536 * 4096 + 128 * 4096 + 2 * 4096
    parameters = 94 * layer + 2 * 151936 * 4096 + 4096
    assert parameters == 235_093_634_560
    assert total(found["convert tune"]) == total(found["merge adapter"]) == 2 * parameters
    tune = shapes(found["convert tune"])
    assert len(tune) == 94 * 12 + 3
    assert tune["layers.93.mlp.experts.gate_proj"] == (128, 4096, 1536)
    assert tune["layers.93.mlp.experts.down_proj"] == (128, 1536, 4096)
    assert tune["layers.0.mlp.router.gate.weight"] == (128, 4096)
    assert tune["layers.41.attn.q_norm.scale"] == (128,)
    assert shapes(found["merge adapter"]) == dict(hf_shapes(QWEN3_235B))
