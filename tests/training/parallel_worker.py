"""What the processes of a job are asked to do with a decoder on many ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.mapping.tensors import LazyTensors
from checkpointing.nf4 import NF4Rounding
from checkpointing.storage.load import copy_into
from checkpointing.training import (
    TransformerDecoder,
    adapter_state_dict,
    add_adapter,
    base_state_dict,
    build_decoder,
    empty_decoder,
    init_adapter,
    load_adapter,
    make_mesh,
    materialize,
    parallelize,
    quantize_base,
)
from checkpointing.training.adapter_switch import adapter_off

CPU = torch.device("cpu")
SEED = 23


@dataclass(frozen=True)
class Setup:
    """A model, and how it is cut.

    Attributes:
        base: directory of its weights.
        tensor_parallel: number of ranks that share each matrix.
        adapter: its adapter, if it has one.
        dtype: of its base.
        compiles: whether its layers are compiled.
    """

    base: Path
    tensor_parallel: int = 1
    adapter: AdapterConfig | None = None
    dtype: torch.dtype = torch.float32
    compiles: bool = False

    def on_one(self) -> TransformerDecoder:
        """The whole model in this process, its adapter fresh."""
        checkpointer = FullModelHFCheckpointer(self.base)
        weights = checkpointer.load_checkpoint()["model"]
        model = build_decoder(checkpointer.model_config, weights, self.dtype)
        torch.manual_seed(SEED)
        if self.adapter is not None:
            add_adapter(model, self.adapter)
        return model

    def on_many(self) -> TransformerDecoder:
        """The same model, of which this process has a part."""
        checkpointer = FullModelHFCheckpointer(self.base)
        model = empty_decoder(checkpointer.model_config, self.dtype)
        torch.manual_seed(SEED)
        if self.adapter is not None:
            add_adapter(model, self.adapter)
        for layer in model.layers if self.compiles else ():
            layer.compile()
        parallelize(model, make_mesh(CPU, self.tensor_parallel))
        materialize(model, CPU)
        checkpointer.load_into(base_state_dict(model))
        if self.adapter is not None:
            init_adapter(model)
        return model

    def trained(self) -> tuple[TransformerDecoder, TransformerDecoder]:
        """Both, with an adapter in which nothing is as it starts."""
        one, many = self.on_one(), self.on_many()
        if self.adapter is not None:
            adapter = _random_values(adapter_state_dict(one))
            for model in (one, many):
                load_adapter(model, adapter)
        return one, many


def _random_values(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """An adapter of the same shapes; nothing in it is zero."""
    generator = torch.Generator().manual_seed(SEED)
    values = {}
    for name, one in like.items():
        size = 0.1 + 0.1 * torch.rand(one.shape, generator=generator)
        sign = torch.randint(0, 2, one.shape, generator=generator) * 2 - 1
        values[name] = size * sign + (0.7 if name.endswith("magnitude") else 0)
    return values


def _share_of_loss(
    model: TransformerDecoder, tokens: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits of the wanted positions, and the sum of their losses, scaled."""
    logits = model(tokens, wanted=wanted)
    labels = tokens.roll(-1, dims=1)[wanted]
    return logits, F.cross_entropy(logits.float(), labels, reduction="sum") / 100


def errors_of_a_step(setup: Setup, tokens: Tensor, first_is_idle: bool = False) -> dict[str, float]:
    """How far a step on many ranks is from one in one process.

    Args:
        setup: of the model.
        tokens: of all ranks.
        first_is_idle: the first ranks have no position of which a loss is computed.

    Returns:
        The largest error of the logits, the loss, the gradients (by the parameters' names) and
        their norm, each in relation to the largest element.
    """
    one, many = setup.trained()
    mesh = make_mesh(CPU, setup.tensor_parallel)
    rank, ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    own = slice(rank, None, ranks)
    wanted = torch.arange(tokens.shape[1]).expand_as(tokens) < tokens.shape[1] - 1
    if first_is_idle:
        wanted = wanted.clone()
        wanted[0::ranks] = False
    torch.manual_seed(SEED)
    expected_logits, expected_loss = _share_of_loss(one, tokens, wanted)
    expected_loss.backward()
    torch.manual_seed(SEED)
    logits, loss = _share_of_loss(many, tokens[own], wanted[own])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    placed = expected_logits.new_zeros((*tokens.shape, expected_logits.shape[-1]))
    placed[wanted] = expected_logits.detach()
    expected = {name: p.grad for name, p in one.named_parameters() if p.requires_grad}
    found: dict[str, Any] = {n: p.grad for n, p in many.named_parameters() if p.requires_grad}
    assert set(found) == set(expected)
    norm: Any = get_total_norm(list(found.values()))
    return {
        "logits": _error(logits, placed[own][wanted[own]]),
        "loss": _error(total, expected_loss),
        "norm": _error(norm.full_tensor(), get_total_norm(list(expected.values()))),
        **{name: _error(found[name].full_tensor(), expected[name]) for name in expected},
    }


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    if not expected.numel():
        return float(found.numel())
    return float((found - expected).abs().max() / expected.abs().max())


def states(setup: Setup) -> tuple[list[str], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Compares the model on many ranks with that in one process, both as they start.

    Returns:
        Names of the tensors of base and adapter that are not the same, bit for bit; and of each
        the shape, and that of what this process has.
    """
    one, many = setup.on_one(), setup.on_many()
    expected = {**base_state_dict(one), **_marked(adapter_state_dict(one))}
    found = {**base_state_dict(many), **_marked(adapter_state_dict(many))}
    assert list(found) == list(expected)
    assert all(isinstance(tensor, DTensor) for tensor in found.values())
    parts = {name: (tuple(t.shape), tuple(t.to_local().shape)) for name, t in found.items()}
    others = [name for name in found if not _same(found[name].full_tensor(), expected[name])]
    return others, parts


def _marked(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    # A module that is trained whole has the name of the base's.
    return {f"adapter: {name}": tensor for name, tensor in adapter.items()}


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def rows_read(setup: Setup) -> dict[str, set[int]]:
    """Which rows of each tensor of the base this process reads to load its part."""
    checkpointer = FullModelHFCheckpointer(setup.base)
    native = checkpointer.load_checkpoint()["model"]
    source, read = checkpointer._base.native, {name: set() for name in native}

    def recorded(name: str) -> Any:
        def record(rows: Tensor, start: int, stop: int) -> Tensor:
            read[name].update(range(start, stop))
            return rows

        return lambda: source.rows(name).map_ranges(record)

    targets = base_state_dict(setup.on_many())
    recording = LazyTensors(source.metas, {name: recorded(name) for name in source.metas})
    copy_into(targets, recording, "loading", lambda count: None)
    return read


def logits_without_adapter(setup: Setup, tokens: Tensor) -> tuple[float, list[str]]:
    """The error of the logits of the base alone; names of what is not cut after that pass."""
    one, many = setup.trained()
    with torch.no_grad(), adapter_off(one), adapter_off(many):
        error = _error(many(tokens), one(tokens))
    # The adapter first: whoever asks for the whole state dict has FSDP2 cut all anew.
    state = {**_marked(adapter_state_dict(many)), **base_state_dict(many)}
    return error, [name for name, tensor in state.items() if not isinstance(tensor, DTensor)]


def save_model(setup: Setup, out: Path, on_many: bool) -> Path:
    """Saves the base, or the base merged with an adapter."""
    one, many = setup.trained()
    model = many if on_many else one
    weights: Any = base_state_dict(model)
    if setup.adapter is not None:
        weights = MergedStateDict(weights, adapter_state_dict(model), setup.adapter)
    checkpointer = FullModelHFCheckpointer(setup.base, output_dir=out)
    return checkpointer.save_checkpoint({"model": weights}, epoch=0, show_progress=False)


def parallelize_quantized(base: Path) -> None:
    """Tries to cut a model whose base is in NF4."""
    model = Setup(base).on_one()
    quantize_base(model, NF4Rounding(torch.float32), CPU)
    parallelize(model, make_mesh(CPU))
