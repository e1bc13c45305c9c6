"""Tiny models on disk and tiny adapters, for all tests."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpointing.adapters import AdapterConfig
from checkpointing.mapping.model_config import Dims, ModelConfig

# Name of each linear module of a layer, and its (out, in) sizes.
LAYER_LINEARS = {
    "attn.q_proj": ("query", "hidden"),
    "attn.k_proj": ("key_value", "hidden"),
    "attn.v_proj": ("key_value", "hidden"),
    "attn.output_proj": ("hidden", "query"),
    "mlp.w1": ("ffn", "hidden"),
    "mlp.w2": ("hidden", "ffn"),
    "mlp.w3": ("ffn", "hidden"),
}
EXPERTS_LINEARS = {
    "mlp.experts.gate_proj": ("expert_ffn", "hidden"),
    "mlp.experts.up_proj": ("expert_ffn", "hidden"),
    "mlp.experts.down_proj": ("hidden", "expert_ffn"),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
MLP = ("w1", "w2", "w3")
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def write_hf(model: nn.Module, directory: Path, **save_options: object) -> Path:
    """Saves a model of transformers; returns the directory."""
    model.save_pretrained(directory, **save_options)
    return directory


def linear_sizes(dims: Dims, targets: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Full native name and (out, in) of every target module of a model.

    Of experts, (experts, in, out), as they are stored.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for layer in range(dims.layers):
        sparse = layer in dims.expert_layers
        for name, (out, in_) in LAYER_LINEARS.items():
            if name.rsplit(".", 1)[-1] in targets and not (sparse and "mlp" in name):
                sizes[f"layers.{layer}.{name}"] = (getattr(dims, out), getattr(dims, in_))
        for name, (out, in_) in EXPERTS_LINEARS.items() if sparse else ():
            if name.rsplit(".", 1)[-1] in targets:
                shape = (dims.experts, getattr(dims, in_), getattr(dims, out))
                sizes[f"layers.{layer}.{name}"] = shape
    if "output" in targets:
        sizes["output"] = (dims.vocab, dims.hidden)
    return sizes


def targets_of(dims: Dims, wanted: Iterable[str]) -> tuple[str, ...]:
    """Those of the wanted target modules that a model has."""
    names = {module.rsplit(".", 1)[-1] for module in linear_sizes(dims, wanted)}
    return tuple(name for name in wanted if name in names)


def random_adapter(
    dims: Dims, config: AdapterConfig, seed: int = 11, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Native adapter tensors; nothing is zero, and DoRA magnitudes are not the row norms."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, sizes in linear_sizes(dims, config.target_modules).items():
        rank = config.rank(module)
        if len(sizes) == 3:
            experts, in_, out = sizes
            stem = module.removesuffix("_proj").replace("experts.", "experts.lora_")
            tensors[f"{stem}_a"] = 0.1 * torch.randn(experts, in_, rank, generator=generator)
            tensors[f"{stem}_b"] = 0.1 * torch.randn(experts, rank, out, generator=generator)
            continue
        out, in_ = sizes
        tensors[f"{module}.lora_a.weight"] = 0.1 * torch.randn(rank, in_, generator=generator)
        tensors[f"{module}.lora_b.weight"] = 0.1 * torch.randn(out, rank, generator=generator)
        if config.use_dora:
            tensors[f"{module}.magnitude"] = 0.5 + torch.rand(out, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def random_native(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A native state dict of random weights, in the order of the decoder."""
    dims = config.dims
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (dims.vocab, dims.hidden)}
    for layer in range(dims.layers):
        prefix = f"layers.{layer}."
        for name, sizes in LAYER_LINEARS.items():
            shapes[f"{prefix}{name}.weight"] = tuple(getattr(dims, size) for size in sizes)
            biased = dims.attention_bias if name.startswith("attn") else dims.mlp_bias
            if biased:
                shapes[f"{prefix}{name}.bias"] = (getattr(dims, sizes[0]),)
        shapes[f"{prefix}sa_norm.scale"] = shapes[f"{prefix}mlp_norm.scale"] = (dims.hidden,)
    shapes["norm.scale"] = (dims.hidden,)
    if not dims.tied:
        shapes["output.weight"] = (dims.vocab, dims.hidden)
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(s, generator=generator).to(dtype) for name, s in shapes.items()}


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and for each the same dtype, shape and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
