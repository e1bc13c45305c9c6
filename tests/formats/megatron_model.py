"""Megatron checkpoints made by hand from a model of transformers, as Megatron-core saves them."""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.families.variants import SIZES, random_model

LAYER_NAMES = {
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
    "block_sparse_moe.gate": "mlp.router",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
}
EXPERT_PARTS = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}


def write_hf(directory: Path, model_type: str, **options: Any) -> Path:
    """A tiny model of transformers, with random weights."""
    random_model(model_type, {**SIZES, **options}).save_pretrained(directory)
    return directory


def hf_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files."""
    return {
        n: t for file in sorted(directory.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def fused_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """The rows of a key-value head's queries, then its key and its value, head by head."""
    rows = []
    for group in range(groups):
        for part in (q, k, v):
            size = len(part) // groups
            rows.append(part[group * size : (group + 1) * size])
    return torch.cat(rows)


def megatron_weights(
    hf: dict[str, Tensor], kv_heads: int, *, grouped: bool = False, local: bool = False
) -> dict[str, Tensor]:
    """All tensors of a model by Megatron-core's names.

    Args:
        hf: by transformers' names.
        kv_heads: key-value heads.
        grouped: the experts of a layer are one module, else a list of modules.
        local: the norms are modules of their own, else parts of the linear layers behind them.
    """
    renamed = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    out = {renamed[name]: tensor for name, tensor in hf.items() if name in renamed}
    layers = 1 + max(int(name.split(".")[2]) for name in hf if name.startswith("model.layers."))
    for layer in range(layers):
        start = f"model.layers.{layer}."
        own = {n.removeprefix(start): t for n, t in hf.items() if n.startswith(start)}
        to = f"decoder.layers.{layer}."
        norm = "input_layernorm.weight" if local else "self_attention.linear_qkv.layer_norm_weight"
        out[to + norm] = own["input_layernorm.weight"]
        dense = "mlp.gate_proj.weight" in own
        fused = dense and not local
        norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
        out[to + norm] = own["post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in own:
                parts = [own[f"self_attn.{each}_proj.{kind}"] for each in "qkv"]
                out[f"{to}self_attention.linear_qkv.{kind}"] = fused_qkv(*parts, kv_heads)
            if f"mlp.gate_proj.{kind}" in own:
                both = [own[f"mlp.{each}_proj.{kind}"] for each in ("gate", "up")]
                out[f"{to}mlp.linear_fc1.{kind}"] = torch.cat(both)
            for name, new in LAYER_NAMES.items():
                if f"{name}.{kind}" in own:
                    out[f"{to}{new}.{kind}"] = own[f"{name}.{kind}"]
        experts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in own.items():
            if ".experts." in name:
                number, part = name.split(".experts.")[1].split(".")[:2]
                experts.setdefault(int(number), {})[EXPERT_PARTS[part]] = tensor
        for number, parts in experts.items():
            fc1, fc2 = torch.cat([parts["gate"], parts["up"]]), parts["down"]
            if grouped:
                out[f"{to}mlp.experts.linear_fc1.weight{number}"] = fc1
                out[f"{to}mlp.experts.linear_fc2.weight{number}"] = fc2
            else:
                out[f"{to}mlp.experts.local_experts.{number}.linear_fc1.weight"] = fc1
                out[f"{to}mlp.experts.local_experts.{number}.linear_fc2.weight"] = fc2
    return out


def with_padding(weights: dict[str, Tensor], rows: int, fill: float = 0.0) -> dict[str, Tensor]:
    """The same with more rows for the vocabulary."""
    padded = dict(weights)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in weights:
            more = weights[name].new_full((rows - len(weights[name]), weights[name].shape[1]), fill)
            padded[name] = torch.cat([weights[name], more])
    return padded


def shard(name: str, tensor: Tensor, ranks: int, rank: int) -> Tensor:
    """What one of the tensor-parallel ranks has of a tensor (Shoeybi et al. 2019)."""
    last = ".".join(name.split(".")[-2:])
    if "linear_fc1." in name and "layer_norm" not in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    if last in ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight") or (
        name == "output_layer.weight"
    ):
        return tensor.chunk(ranks)[rank].clone()
    if last == "linear_proj.weight" or "linear_fc2.weight" in name:
        return tensor.chunk(ranks, 1)[rank].clone()
    return tensor


def numbers(name: str) -> tuple[int | None, int | None]:
    """Which layer and which expert a tensor is of."""
    words = name.split(".")
    layer = int(words[2]) if words[1] == "layers" else None
    expert = None
    if "local_experts" in words:
        expert = int(words[words.index("local_experts") + 1])
    elif "experts" in words and words[-1] != "weight":
        expert = int(words[-1].removeprefix("weight"))
    return layer, expert


def renumbered(name: str, layer: int | None, expert: int | None) -> str:
    """The name with other numbers of layer and expert."""
    words = name.split(".")
    if layer is not None:
        words[2] = str(layer)
    if expert is not None and "local_experts" in words:
        words[words.index("local_experts") + 1] = str(expert)
    elif expert is not None:
        words[-1] = f"weight{expert}"
    return ".".join(words)


def rank_weights(
    weights: dict[str, Tensor],
    *,
    tensor: tuple[int, int] = (1, 0),
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
    experts: range | None = None,
    whole_experts: bool = False,
) -> dict[str, Tensor]:
    """The tensors of one rank, with layers and experts counted from 0.

    Args:
        weights: of the whole model.
        tensor: number of tensor-parallel ranks, and this one.
        layers: that it has; by default all.
        first: it has what comes before the layers.
        last: it has what comes behind them.
        experts: that it has; by default all.
        whole_experts: experts are not cut among the tensor-parallel ranks.
    """
    own = {}
    for name, whole in weights.items():
        layer, expert = numbers(name)
        if layer is None and not (first if name.startswith("embedding.") else last):
            continue
        if layers is not None and layer is not None and layer not in layers:
            continue
        if experts is not None and expert is not None and expert not in experts:
            continue
        new = renumbered(
            name,
            layer if layers is None or layer is None else layer - layers.start,
            expert if experts is None or expert is None else expert - experts.start,
        )
        is_whole = whole_experts and expert is not None
        own[new] = whole if is_whole else shard(name, whole, *tensor)
    return own


class OfTheTrainer:
    """Something that a trainer saves and nobody else can load."""

    def __init__(self) -> None:
        self.random = random.Random(3)


def write_rank(directory: Path, *chunks: dict[str, Tensor], **settings: Any) -> None:
    """The file of one rank, with what Megatron keeps beside the weights."""
    directory.mkdir(parents=True)
    keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    content = dict(zip(keys, chunks, strict=True))
    for chunk in chunks:
        chunk["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None  # type: ignore[assignment]
    args = argparse.Namespace(params_dtype=torch.bfloat16, activation=print, **settings)
    torch.save(
        {
            **content,
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 12,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}, "trainer": OfTheTrainer()},
            "rng_state": [{"random": random.getstate(), "odd": OfTheTrainer()}],
        },
        directory / "model_optim_rng.pt",
    )


def write_root(directory: Path, hf: Path, iteration: int = 12) -> Path:
    """A checkpoint's directory with the model's config; returns that of the iteration."""
    directory.mkdir()
    shutil.copyfile(hf / "config.json", directory / "config.json")
    (directory / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return directory / f"iter_{iteration:07d}"


def config_of(hf: Path) -> dict[str, Any]:
    """What config.json says."""
    return dict(json.loads((hf / "config.json").read_text()))


def split(count: int, parts: int) -> Iterator[range]:
    """Numbers in as many ranges of one length."""
    size = count // parts
    for part in range(parts):
        yield range(part * size, (part + 1) * size)


def write_megatron(
    directory: Path,
    hf: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    chunks: int = 1,
    grouped: bool = False,
    local: bool = False,
    whole_experts: bool = False,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint of a model of transformers, as many ranks save it; returns its directory.

    Args:
        directory: to write.
        hf: the model.
        tensor: number of tensor-parallel ranks.
        pipeline: number of stages.
        expert: number of expert-parallel ranks.
        chunks: of layers in each stage, one from each round through the pipeline.
        grouped: the experts of a layer are one module.
        local: the norms are modules of their own.
        whole_experts: experts are not cut among the tensor-parallel ranks.
        settings: what Megatron's arguments say beside.
    """
    config = config_of(hf)
    weights = megatron_weights(
        hf_weights(hf), config["num_key_value_heads"], grouped=grouped, local=local
    )
    # Rows behind the vocabulary are trained like the others, or stay what they were at first.
    rows = -(-config["vocab_size"] // (128 * tensor)) * 128 * tensor
    weights = with_padding(weights, rows, fill=0.3)
    if pipeline > 1 and "output_layer.weight" not in weights:
        weights["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
    layers = list(split(config["num_hidden_layers"], pipeline * chunks))
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    iteration = write_root(directory, hf)
    for stage in range(pipeline):
        for rank in range(tensor):
            for number, own in enumerate(split(experts, expert)):
                name = f"mp_rank_{rank:02d}"
                name += f"_{stage:03d}" if pipeline > 1 else ""
                name += f"_{number:03d}" if expert > 1 else ""
                parts = [
                    rank_weights(
                        weights,
                        tensor=(tensor, rank),
                        layers=layers[chunk * pipeline + stage],
                        first=chunk * pipeline + stage == 0,
                        last=chunk * pipeline + stage == len(layers) - 1,
                        experts=own if experts else None,
                        whole_experts=whole_experts,
                    )
                    for chunk in range(chunks)
                ]
                write_rank(iteration / name, *parts, **(settings or {}))
    return directory
