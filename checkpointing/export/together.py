"""The processes that read a stream together, since the model lies in shards in them."""

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from checkpointing.errors import ConfigError
from checkpointing.export.stream import Content, WeightStream
from checkpointing.mapping.tensors import is_dtensor
from checkpointing.sharded import check_alike, gathering
from checkpointing.storage.ranks import Ranks, all_ranks
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.lora import adapter_state_dict, base_state_dict

_Planned = TypeVar("_Planned")


class Together:
    """All processes of a job that make a stream at the same time; often this one alone.

    Args:
        model: what is streamed.
        to_ranks: of the processes that get the tensors; all, if not given.
    """

    def __init__(
        self, model: TransformerDecoder | str | Path, to_ranks: Collection[int] | None
    ) -> None:
        self._model = model if isinstance(model, TransformerDecoder) else None
        is_shared = self._model is not None and is_in_shards(self._model)
        self._to_ranks = to_ranks
        self._ranks = ranks_that_stream(is_shared or to_ranks is not None)

    def agreed(self) -> AbstractContextManager[None]:
        """What is raised in the block by one process is raised by all."""
        return self._ranks.agreed()

    def check_alike(self, function: str, arguments: Mapping[str, Any]) -> None:
        """Checks that all processes stream the same, before anything is gathered for it.

        Args:
            function: which was called, for errors.
            arguments: of it, by name.

        Raises:
            ConfigError: if the arguments differ, or ``to_ranks`` names no processes of the job.
            TensorMismatchError: lists the tensors that are not the same in all processes.
        """
        to_ranks = None if self._to_ranks is None else sorted(set(self._to_ranks))
        count = self._ranks.count
        if to_ranks is not None and not (to_ranks and set(to_ranks) <= set(range(count))):
            raise ConfigError(
                f"to_ranks: {to_ranks}; give at least one of the ranks 0 to {count - 1}, or leave "
                "it out so that every process gets all tensors"
            )
        if count == 1:
            return
        state: dict[str, Any] = {}
        if self._model is not None:
            config = self._model.adapter_config
            state = {"model": base_state_dict(self._model)}
            state["adapter"] = adapter_state_dict(self._model)
            arguments = {**arguments, "adapter_config": config and config.to_state()}
        arguments = {**arguments, "to_ranks": to_ranks}
        check_alike(self._ranks, state, arguments, function)

    def plan(self, make: Callable[[], _Planned]) -> _Planned:
        """What a function makes that may gather tensors for it."""
        with gathering(self._ranks):
            return make()

    def stream(self, content: Content, version: int, digests: bool) -> WeightStream:
        """The stream, which all processes read."""
        readers = range(self._ranks.count) if self._to_ranks is None else self._to_ranks
        return WeightStream(content, version, digests, self._ranks, frozenset(readers))


def ranks_that_stream(together: bool) -> Ranks:
    """All processes of the job if they are to stream together, else this one alone."""
    is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return all_ranks("streaming weights") if together and is_one_of_many else Ranks()


def is_in_shards(model: TransformerDecoder) -> bool:
    """Whether a model's parameters lie in shards in the processes of a job.

    What FSDP has put together, and keeps so for a backward pass that may never come, is let go of:
    the outermost module's parameters after every forward pass.
    """
    # Shards are of the processes of a job. To walk through a model takes milliseconds.
    if not (dist.is_available() and dist.is_initialized()):
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
    return any(map(is_dtensor, model.parameters()))
