"""Rows of a dataset in a seeded order that can be taken up again anywhere."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from checkpointing.errors import ConfigError
from checkpointing.training.distributed import DataShare

_DATA = "dataset or tokenizer (checksum of the rows)"


class Rows(Protocol):
    """A dataset."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int) -> Any:
        """One row."""

    def fingerprint(self) -> int:
        """Equal for equal rows in equal order."""


class RowLoader:
    """Goes through a dataset a few rows at a time, in an order of its own for each epoch.

    The order follows from seed and epoch alone, so that the place in the data is two numbers.

    Several processes go through it together: their batches are parts of the batches that one
    process would have whose batch size is the sum of theirs, and so their places are one.

    Args:
        dataset: rows.
        batch_size: rows in a batch; the last batch of an epoch may have fewer, or none if another
            process has all that are left.
        shuffle: whether the order is random.
        seed: of the order.
        share: the part of all batches that is handed out here.

    Raises:
        ConfigError: if the batch size is below 1.
    """

    def __init__(
        self,
        dataset: Rows,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        share: DataShare | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: must be at least 1")
        self._dataset = dataset
        self._share = share or DataShare()
        # Of all processes together.
        self._batch_size = batch_size * self._share.count
        self._shuffle = shuffle
        self._seed = seed
        self._fingerprint = dataset.fingerprint()
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self._dataset) // self._batch_size)

    def start_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch, counted from 0."""
        self._epoch = epoch
        self._position = 0

    def __iter__(self) -> Iterator[Any]:
        """Lists of rows from the current place to the end of the epoch."""
        order = self._order()
        while self._position < len(order):
            chosen = order[self._position : self._position + self._batch_size]
            self._position += len(chosen)
            yield [self._dataset[index] for index in chosen[self._share.rank :: self._share.count]]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._dataset)))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(len(self._dataset), generator=generator).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: all rows before it have been handed out."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def changed_since(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What differs from a saved state, by its name: as it was saved, and as it is."""
        own = self.state_dict()
        size = "batch_size" if self._share.count == 1 else "batch_size, of all processes together"
        names = {"fingerprint": _DATA, "batch_size": size, "shuffle": "shuffle", "seed": "seed"}
        return {
            name: (state[key], own[key]) for key, name in names.items() if state[key] != own[key]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved place. Between epochs the data may be other data.

        Raises:
            ConfigError: if the place is within an epoch of other data or other batches.
        """
        changed = self.changed_since(state)
        if state["position"] > 0 and changed:
            raise ConfigError(
                f"cannot go on within epoch {state['epoch']}: {', '.join(changed)} changed "
                "since the checkpoint was saved; undo the change, or resume from a checkpoint "
                "at the end of an epoch"
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
