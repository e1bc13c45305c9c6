"""What the processes of a job do in the tests of streams: models in shards, and readers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from checkpointing import AdapterConfig
from checkpointing.export import (
    WeightStream,
    adapter_stream,
    merged,
    merged_stream,
    shared_window,
    stream,
)
from checkpointing.export.engines.base import sync
from checkpointing.export.engines.transformers_engine import TransformersEngine
from checkpointing.mapping.model_config import Dims, ModelConfig
from checkpointing.training import TransformerDecoder, add_adapter, build_decoder
from tests.export.live import bits, loaded_model, shake
from tests.tiny import ATTENTION, MLP, random_native

TOKENS = torch.randint(3, 131, (1, 23), generator=torch.Generator().manual_seed(3))
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "w1", "w3", "output", "tok_embeddings")
CUTS = ("fsdp", "fsdp, after a forward pass", "tensor parallel", "fsdp over tensor parallel")
Streamed = list[tuple[str, torch.dtype, tuple[int, ...], bytes]]


def cut_model(
    base: Path, cut: str, config: AdapterConfig, dtype: torch.dtype = torch.float32
) -> TransformerDecoder:
    """A model with an adapter in which nothing is zero, in shards; the same for each cut.

    Args:
        base: directory of the base.
        cut: one of ``CUTS``.
        config: of the adapter.
        dtype: of the base.
    """
    model = loaded_model(base, config, dtype)
    count = dist.get_world_size()
    along: DeviceMesh | None = init_device_mesh("cpu", (count,))
    if cut == "tensor parallel":
        _cut_tensors(model, along)
        return model
    if cut == "fsdp over tensor parallel":
        mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
        _cut_tensors(model, mesh["tp"])
        along = mesh["dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=along)
    fully_shard(model, mesh=along)
    if cut == "fsdp, after a forward pass":
        # Now the outermost module holds its parameters whole, for a backward pass.
        with torch.no_grad():
            model(TOKENS)
    return model


def _cut_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, module in list(model.named_modules()):
        for own, parameter in list(module.named_parameters(recurse=False)):
            way = [_placement(f"{name}.{own}", parameter)]
            cut = distribute_tensor(parameter.data, mesh, way, src_data_rank=None)
            setattr(module, own, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _placement(name: str, tensor: Tensor) -> Placement:
    if "lora_a" in name:
        return Shard(1)
    if "lora_b" in name or "magnitude" in name:
        return Shard(0)
    if tensor.dim() < 2:
        return Replicate()
    return Shard(0) if any(f"{module}." in name for module in _BY_ROWS) else Shard(1)


def content(found: WeightStream) -> Streamed:
    """Names, dtypes, shapes and bytes of what a stream has in this process."""
    return [(n, t.dtype, tuple(t.shape), bits(t)) for n, t in found]


def read(
    base: Path,
    cut: str,
    config: AdapterConfig,
    kind: str = "merged",
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    few: int = 32 << 20,
    **arguments: Any,
) -> dict[str, Any]:
    """Reads a stream to its end, and compares the model's parts before and after.

    Args:
        base: directory of the base.
        cut: as for :func:`cut_model`.
        config: of the adapter.
        kind: ``"merged"`` or ``"adapter"``.
        window: bytes that are computed at a time.
        dtype: of the base.
        few: bytes that a process alone computes without starting threads.
        arguments: of the stream.
    """
    model = cut_model(base, cut, config, dtype)
    stream._WINDOW = window or 64 << 20
    shared_window.FEW = few
    if kind == "adapter":
        arguments["base"] = "a base"
    make = merged_stream if kind == "merged" else adapter_stream
    before = [bits(p.to_local()) for p in make_sharded(model)]
    with make(model, **arguments) as found:
        tensors = content(found)
    after = [bits(p.to_local()) for p in make_sharded(model)]
    return {
        "tensors": tensors,
        "digests": found.digests,
        "is whole": found.is_complete,
        "is unchanged": before == after,
        "survival": found.survival,
        "config": found.adapter_config,
        "version": found.version,
    }


def make_sharded(model: TransformerDecoder) -> list[Any]:
    """The parts that this process has."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return list(model.parameters())


def stop_early(end: str, base: Path, config: AdapterConfig, at: int = 6) -> int:
    """Reads some tensors of a stream, and returns how many.

    Args:
        end: of the first one, after so many tensors: ``"break"``, ``"close"``, ``"raise"``,
            ``"change"`` the model, ``"compute"`` nothing any more, or ``"read on"``.
        base: directory of the base.
        config: of the adapter.
        at: number of tensors that are read before that.
    """
    model = cut_model(base, "fsdp", config)
    stream._WINDOW = 30_000
    count = 0
    with merged_stream(model) as found:
        for name, _ in found:
            count += 1
            if count != at or end == "read on":
                continue
            if end == "break":
                break
            if end == "raise":
                raise KeyError(name)
            if end == "close":
                found.close()
            elif end == "change":
                with torch.no_grad():
                    model.norm.scale.mul_(2)
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(shared_window, "copy_into", _refuse)
                    count += len(list(found))
    return count


def _refuse(*arguments: Any) -> None:
    raise OSError(5, "Input/output error", "weights")


def read_all_again(base: Path, config: AdapterConfig) -> int:
    """Number of tensors of a stream that nothing disturbs."""
    return len(dict(merged_stream(cut_model(base, "fsdp", config))))


def expect(expected: dict[str, tuple[int, ...]] | None, base: Path, config: AdapterConfig) -> None:
    """Makes a stream for an engine that only some processes know."""
    merged_stream(cut_model(base, "fsdp", config), expected=expected, to_ranks=[0])


def make(given: dict[str, Any], base: Path, config: AdapterConfig) -> None:
    """Makes a stream with arguments that may be others in each process."""
    given = dict(given)
    if given.pop("other model", False):
        config = replace(config, r=5)
    merged_stream(cut_model(base, "fsdp", config), **given)


def merge_in_place(base: Path, config: AdapterConfig) -> None:
    """Puts merged weights in the place of shards."""
    with merged(cut_model(base, "fsdp", config)):
        pass


def sync_engine(
    engine_in: int | None,
    base: Path,
    config: AdapterConfig,
    way: str,
    engine_base: Path | None = None,
) -> list[Any]:
    """Syncs an engine that one process has, twice, and compares it with the model.

    Args:
        engine_in: rank of that process.
        base: directory of the base.
        config: of the adapter.
        way: of syncing.
        engine_base: of the engine's base, if it is another one.

    Returns:
        The versions that the engine had, and how far its log-probabilities are off after each; in
        a process that has none, nothing.
    """
    from transformers import AutoModelForCausalLM

    model = cut_model(base, "fsdp", config)
    engine = None
    if dist.get_rank() == engine_in:
        own = AutoModelForCausalLM.from_pretrained(engine_base or base, dtype=torch.float32)
        engine = TransformersEngine(own)
    seen: list[Any] = []
    for version in (1, 2):
        with torch.no_grad():
            # Each process its part.
            for name, parameter in model.named_parameters():
                if "lora_b" in name:
                    parameter.mul_(1.5)
        sync(model, engine, way, version, base)
        with torch.no_grad():
            logits = model(TOKENS)
        if engine is not None:
            expected = logits[0, :-1].log_softmax(-1)
            expected = expected.gather(-1, TOKENS[0, 1:, None])[:, 0]
            found = engine.logprobs([TOKENS[0].tolist()])[0]
            seen += [engine.version, float((found - expected).abs().max())]
    return seen


def measure_memory(to_ranks: list[int] | None) -> dict[str, int]:
    """Streams a model of many layers a little at a time, and keeps nothing.

    Returns:
        Bytes: of the model's part, of its largest tensor, and by how much the process grew.
    """
    dims = Dims(
        layers=24, hidden=416, heads=8, kv_heads=4, head_dim=56, ffn=1040, vocab=2112, tied=False
    )
    config = ModelConfig("llama", dims, 1e-5, 10000.0, None, 512)
    model = build_decoder(config, random_native(config), torch.float32)
    add_adapter(model, AdapterConfig(4, 6, (*ATTENTION, *MLP)))
    shake(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    stream._WINDOW = 2 << 20
    parts = [parameter.to_local() for parameter in make_sharded(model)]
    with merged_stream(model, to_ranks=to_ranks) as found:
        next(found, None)
        # What threads and buffers take once.
        Path("/proc/self/clear_refs").write_text("5")
        before = _kilobytes("VmRSS")
        for _ in found:
            pass
    return {
        "part": sum(part.nbytes for part in parts),
        "largest": max(meta.nbytes for meta in found.metas.values()),
        "grown": (_kilobytes("VmHWM") - before) * 1024,
    }


def _kilobytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {field}")
