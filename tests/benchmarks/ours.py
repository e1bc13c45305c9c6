"""This project's jobs, through what users call."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from torch import Tensor, nn

from checkpointing import (
    AdapterConfig,
    AsyncCheckpointer,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
    MergedStateDict,
)
from checkpointing.convert import plan_conversion, write_model
from checkpointing.export import merged_stream
from checkpointing.export.engines import RolloutEngine, sync
from checkpointing.export.engines.transformers_engine import TransformersEngine
from checkpointing.merge import plan_merge
from checkpointing.training import (
    TransformerDecoder,
    add_adapter,
    base_state_dict,
    build_decoder,
    load_adapter,
)
from checkpointing.verify import verify
from tests.benchmarks.drift import changed_share
from tests.benchmarks.durable import chill, cleared, warm
from tests.benchmarks.figures import Figures
from tests.benchmarks.models import MODEL_TYPE
from tests.benchmarks.touch import touched

CHECKPOINTERS = {
    "hf": FullModelHFCheckpointer,
    "meta": FullModelMetaCheckpointer,
    "tune": FullModelTorchTuneCheckpointer,
}


def _checkpointer(format: str, base: str, **arguments: Any) -> Any:
    return CHECKPOINTERS[format](base, model_type=MODEL_TYPE, **arguments)


@cache
def _state(format: str, base: str, adapter: str | None = None) -> dict[str, Any]:
    """What a trainer holds: weights of its own, not views of files, and an adapter."""
    state = _checkpointer(format, base, adapter_checkpoint=adapter).load_checkpoint()
    state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
    if adapter is not None:
        state["adapter"] = {name: tensor.clone() for name, tensor in state["adapter"].items()}
        config = AdapterConfig.from_state(state["adapter_config"])
        state["model"] = MergedStateDict(state["model"], state["adapter"], config)
    return state


def load(base: str, cold: bool = False) -> Callable[[], Any]:
    """Loads native weights, and reads of every page."""
    (chill if cold else warm)(Path(base))
    return lambda: touched(_checkpointer("hf", base).load_checkpoint()["model"])


def load_into(base: str) -> Callable[[], Any]:
    """Loads into parameters that exist, as a trainer that has made its model does."""
    warm(Path(base))
    parameters = {
        name: nn.Parameter(tensor.clone(), requires_grad=False)
        for name, tensor in _checkpointer("hf", base).load_checkpoint()["model"].items()
    }
    return lambda: _checkpointer("hf", base).load_into(parameters)


def save(
    base: str, out: str, format: str = "hf", adapter: str | None = None, checksums: bool = True
) -> Callable[[], Any]:
    """Saves a checkpoint: of an adapter run with the merged model, else of the weights."""
    state = _state(format, base, adapter)
    saver = _checkpointer(format, base, output_dir=cleared(Path(out)))
    if checksums:
        return lambda: saver.save_checkpoint(state, epoch=0)

    def unhashed() -> None:
        with without_checksums():
            saver.save_checkpoint(state, epoch=0)

    return unhashed


@contextmanager
def without_checksums():
    """Writing as it would be if nothing were hashed."""

    class Nothing:
        def __init__(self, *data: object, **options: object) -> None: ...

        def update(self, data: object) -> None: ...

        def reset(self) -> None: ...

        def copy(self) -> "Nothing":
            return self

        def digest(self) -> bytes:
            return bytes(8)

        def intdigest(self) -> int:
            return 0

        def hexdigest(self) -> str:
            return "0" * 16

    with (
        mock.patch.object(xxhash, "xxh3_64", Nothing),
        mock.patch.object(xxhash, "xxh3_64_digest", lambda *_, **__: bytes(8)),
        mock.patch.object(xxhash, "xxh3_64_intdigest", lambda *_, **__: 0),
        mock.patch.object(xxhash, "xxh3_64_hexdigest", lambda *_, **__: "0" * 16),
    ):
        yield


def save_adapter(base: str, out: str, adapter: str) -> Callable[[], Any]:
    """Saves the adapter of an adapter run, and nothing else."""
    state = _state("hf", base, adapter)
    saver = _checkpointer("hf", base, output_dir=cleared(Path(out)))
    return lambda: saver.save_checkpoint(state, epoch=0, adapter_only=True)


def merge(base: str, adapter: str, out: str) -> Callable[[], Any]:
    """Folds an adapter into its base, from directory to directory."""
    warm(Path(base))
    destination = cleared(Path(out))
    return lambda: write_model(plan_merge(base, adapter).plan, destination)


def convert(source: str, to: str, out: str) -> Callable[[], Any]:
    """Writes a model in another format."""
    warm(Path(source))
    destination = cleared(Path(out))
    return lambda: write_model(plan_conversion(source, to, MODEL_TYPE), destination)


def verify_checkpoint(directory: str) -> Callable[[], Any]:
    """Compares every byte with its checksum."""
    warm(Path(directory))

    def run() -> None:
        problems = verify(directory).problems
        assert not problems, problems

    return run


def save_in_background(
    base: str, out: str, adapter: str | None = None, adapter_only: bool = False
) -> Callable[[], Any]:
    """What the trainer waits for in its first and a later save, and for a copy of as many bytes."""
    state = _state("hf", base, adapter)
    staged = [*state["adapter"].values()] if adapter_only else [*state["model"].values()]
    copies = [tensor.clone() for tensor in staged]
    saver = AsyncCheckpointer(_checkpointer("hf", base, output_dir=cleared(Path(out))))
    saver.check_save(state, adapter_only=adapter_only)

    def run() -> Figures:
        times = []
        for epoch in range(2):
            saver.save_checkpoint(state, epoch=epoch, adapter_only=adapter_only)
            saver.wait()
            assert saver.times is not None
            times.append(saver.times)
        first, later = times
        started = time.perf_counter()
        for copy, tensor in zip(copies, staged, strict=True):
            copy.copy_(tensor)
        copied = time.perf_counter() - started
        return Figures(
            first=first.blocked, blocked=later.blocked, written=later.written, copy=copied
        )

    return run


def train(base: str, out: str, threads: int) -> Callable[[], Any]:
    """Training steps per second beside a save that is written in the background, and without.

    Args:
        base: the model that is saved; what is trained is small.
        out: where to.
        threads: that torch computes with.
    """
    state = _state("hf", base)
    saver = AsyncCheckpointer(_checkpointer("hf", base, output_dir=cleared(Path(out))))
    saver.check_save(state)
    step = _training_step()

    def is_written() -> bool:
        saver.wait(block=False)
        return saver.times is not None

    def run() -> Figures:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            _rate(step, _after(1.0))
            alone = [_rate(step, _after(2.0))]
            saver.save_checkpoint(state, epoch=0)
            beside = _rate(step, is_written)
            alone.append(_rate(step, _after(2.0)))
        finally:
            torch.set_num_threads(before)
        return Figures(beside=beside, alone=sum(alone) / 2)

    return run


def _rate(step: Callable[[], None], is_over: Callable[[], bool]) -> float:
    """Steps per second until something is over."""
    started, steps = time.perf_counter(), 0
    while steps == 0 or not is_over():
        step()
        steps += 1
    return steps / (time.perf_counter() - started)


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def _training_step() -> Callable[[], None]:
    """One of a few milliseconds."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs: Tensor = torch.randn(128, 256)

    def step() -> None:
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()

    return step


@cache
def _live(base: str, adapter: str) -> TransformerDecoder:
    """A native model with an adapter, as a trainer holds it."""
    checkpointer = _checkpointer("hf", base, adapter_checkpoint=adapter)
    state = checkpointer.load_checkpoint()
    model = build_decoder(checkpointer.model_config, state["model"], torch.bfloat16)
    add_adapter(model, AdapterConfig.from_state(state["adapter_config"]))
    load_adapter(model, state["adapter"])
    return model


def stream(base: str, adapter: str, digests: bool = True) -> Callable[[], Any]:
    """Reads all merged weights of a live model, and lets go of each."""
    model = _live(base, adapter)
    return lambda: _export(model, digests)


def _export(model: TransformerDecoder, digests: bool) -> None:
    for _, tensor in merged_stream(model, digests=digests):
        del tensor


def drift(base: str, adapter: str, exports: int) -> Callable[[], Any]:
    """Share of the base's weights that are others after so many exports."""
    model = _live(base, adapter)
    before = {name: weight.clone() for name, weight in base_state_dict(model).items()}

    def run() -> Figures:
        for _ in range(exports):
            _export(model, digests=False)
        return Figures(changed=changed_share(before, base_state_dict(model)))

    return run


@cache
def _transformers(base: str) -> RolloutEngine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return TransformersEngine(model)


def sync_adapter(base: str, adapter: str) -> Callable[[], Any]:
    """Gives a model of transformers in the same process the next version of an adapter."""
    model, engine = _live(base, adapter), _transformers(base)
    if engine.version < 0:
        # The first makes room for it.
        sync(model, engine, "adapter", 0, base)
    return lambda: sync(model, engine, "adapter", engine.version + 1, base)
