"""What an engine can do, and how it gets new weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from checkpointing.errors import ConfigError
from checkpointing.export.stream import WeightStream
from checkpointing.export.together import is_in_shards, ranks_that_stream
from checkpointing.export.weights import adapter_stream, merged_stream
from checkpointing.training.decoder import TransformerDecoder

WAYS = ("merged", "adapter")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: after which a completion ends.
        temperature: that logits are divided by; 0 takes the likeliest token.
        top_p: of the likeliest tokens only so many are drawn from that they have this probability
            together; 1 for all.
        top_k: of so many of the likeliest tokens only; ``None`` for all.
        seed: of the engine's random numbers; ``None`` leaves them as they are.
        stop_token_ids: tokens that end a completion, and are its last.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What an engine wrote after a prompt.

    Attributes:
        tokens: ids, without the prompt.
        logprobs: natural logarithm of the probability of each, by the engine's weights at
            temperature 1, without top-p and top-k.
        version: number of the weights that it was written with.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


class RolloutEngine(Protocol):
    """An engine that generates text, and takes new weights while it runs.

    Attributes:
        name: for errors and reports.
        version: number of the weights that it holds; -1 for those that it was started with.
        dtype: that it computes in.
        needs_tied_head: it keeps a copy of a tied head, which must be sent too.
    """

    name: str
    version: int
    dtype: torch.dtype
    needs_tied_head: bool

    def expected(self) -> Mapping[str, Sequence[int]] | None:
        """Shape of each tensor of its base model, by Hugging Face's name, if it can tell."""

    def load_merged(self, stream: WeightStream) -> None:
        """Takes all weights; what it has cached of older ones is forgotten."""

    def load_adapter(self, stream: WeightStream) -> None:
        """Takes an adapter on its base, in place of an older one."""

    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """So many completions of each prompt, given as token ids."""

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """fp32 ``[length - 1]`` for each sequence: of each token but the first, given those before
        it, the natural logarithm of its probability at temperature 1."""

    def close(self) -> None:
        """Frees what it holds."""


def sync(
    model: TransformerDecoder,
    engine: RolloutEngine | None,
    way: str,
    version: int,
    base: str | Path | None = None,
) -> WeightStream:
    """Gives an engine the weights that a model has now.

    Where the model lies in shards in the processes of a job, all of them must call it. What an
    engine of one process raises is raised in all.

    Args:
        model: the native model; it is not changed.
        engine: the engine; ``None`` in a process of several that has none.
        way: ``"merged"`` for all weights, ``"adapter"`` for the adapter alone.
        version: number of these weights, above the engine's.
        base: repository or directory of the base, for an adapter's config.

    Returns:
        The stream, read to its end: it has the digests of what was sent, and a report.

    Raises:
        ConfigError: if the way is unknown, or the version is not new.
        TensorMismatchError: lists all tensors that do not fit the engine; it is as it was then.
    """
    if way not in WAYS:
        raise ConfigError(f"sync: {way!r} is unknown; give one of {', '.join(WAYS)}")
    ranks = ranks_that_stream(is_in_shards(model))
    with ranks.agreed():
        # Nothing may be raised in one process alone between this exchange and the stream's own.
        expected = None if engine is None or way == "adapter" else engine.expected()
        own = None if engine is None else _Needs.of(engine)
        needs = {rank: one for rank, one in enumerate(ranks.exchange(own)) if one is not None}
        dtype, tied_head = _alike(needs, version)
        to_ranks = None if ranks.count == 1 else list(needs)
        if way == "adapter":
            stream = adapter_stream(model, base, version=version, to_ranks=to_ranks)
        else:
            stream = merged_stream(
                model,
                dtype=dtype,
                expected=expected,
                tied_head=tied_head,
                version=version,
                to_ranks=to_ranks,
            )
        with stream:
            if engine is None:
                for _ in stream:
                    pass
            elif way == "adapter":
                engine.load_adapter(stream)
            else:
                engine.load_merged(stream)
    return stream


@dataclass(frozen=True)
class _Needs:
    """What an engine needs of a stream, as other processes are told it."""

    name: str
    version: int
    dtype: torch.dtype
    tied_head: bool

    @classmethod
    def of(cls, engine: RolloutEngine) -> "_Needs":
        return cls(engine.name, engine.version, engine.dtype, engine.needs_tied_head)


def _alike(needs: Mapping[int, _Needs], version: int) -> tuple[torch.dtype, bool]:
    """The dtype of what is sent, and whether the head is sent, which all engines agree on."""
    if not needs:
        raise ConfigError("sync: there is no engine; give one, in at least one of the processes")
    for one in needs.values():
        if version <= one.version:
            raise ConfigError(
                f"sync: version {version}, and {one.name} holds {one.version}: count up, since "
                "engines keep what they computed by the version of the weights"
            )
    kinds = {(one.dtype, one.tied_head) for one in needs.values()}
    if len(kinds) > 1:
        raise ConfigError(
            "sync: the engines of "
            + ", ".join(f"rank {rank} ({one.name}, {one.dtype})" for rank, one in needs.items())
            + " need other weights: give all processes the same kind of engine, of one dtype"
        )
    return kinds.pop()
