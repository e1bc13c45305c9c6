"""What an engine can do, and how it gets new weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from checkpointing.errors import ConfigError
from checkpointing.export.stream import WeightStream
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
    engine: RolloutEngine,
    way: str,
    version: int,
    base: str | Path | None = None,
) -> WeightStream:
    """Gives an engine the weights that a model has now.

    Args:
        model: the native model; it is not changed.
        engine: the engine.
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
    if version <= engine.version:
        raise ConfigError(
            f"sync: version {version}, and {engine.name} holds {engine.version}: count up, since "
            "engines keep what they computed by the version of the weights"
        )
    if way == "adapter":
        with adapter_stream(model, base, version=version) as stream:
            engine.load_adapter(stream)
    else:
        with merged_stream(
            model,
            dtype=engine.dtype,
            expected=engine.expected(),
            tied_head=engine.needs_tied_head,
            version=version,
        ) as stream:
            engine.load_merged(stream)
    return stream
