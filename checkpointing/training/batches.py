"""Batches of rows in a seeded order that can be taken up again anywhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import ConfigError
from checkpointing.training.data import InstructDataset, TokenRow
from checkpointing.training.tokenizer import IGNORED

_DATA = "dataset or tokenizer (checksum of the rows)"


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to one length.

    Attributes:
        tokens: int64 ``[batch, seq]``.
        labels: int64 ``[batch, seq]``; :data:`IGNORED` where nothing is to be learnt.
        input_pos: int64 ``[batch, seq]``, position in the conversation; ``None`` if not packed.
        document_ids: int64 ``[batch, seq]``, number of the conversation in its row, -1 for
            padding; ``None`` if not packed.
        num_tokens: without padding.
    """

    tokens: Tensor
    labels: Tensor
    input_pos: Tensor | None
    document_ids: Tensor | None
    num_tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The batch on another device."""
        return Batch(
            self.tokens.to(device),
            self.labels.to(device),
            None if self.input_pos is None else self.input_pos.to(device),
            None if self.document_ids is None else self.document_ids.to(device),
            self.num_tokens,
        )


def collate(rows: Sequence[TokenRow], pad_id: int, packed: bool) -> Batch:
    """Pads rows to the longest of them.

    Padding comes last and attention is causal, so that no token of a row sees it.

    Args:
        rows: at least one.
        pad_id: token id of the padding.
        packed: give the positions and numbers of the conversations too.
    """
    size = (len(rows), max(len(row.tokens) for row in rows))
    tokens = torch.full(size, pad_id)
    labels = torch.full(size, IGNORED)
    input_pos = torch.zeros(size, dtype=torch.int64) if packed else None
    document_ids = torch.full(size, -1) if packed else None
    for index, row in enumerate(rows):
        length = len(row.tokens)
        tokens[index, :length] = torch.tensor(row.tokens)
        labels[index, :length] = torch.tensor(row.labels)
        if input_pos is not None and document_ids is not None:
            lengths = torch.tensor(row.lengths)
            numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            starts = lengths.cumsum(0) - lengths
            document_ids[index, :length] = numbers
            input_pos[index, :length] = torch.arange(length) - starts[numbers]
    num_tokens = sum(len(row.tokens) for row in rows)
    return Batch(tokens, labels, input_pos, document_ids, num_tokens)


class BatchLoader:
    """Goes through a dataset in batches, in an order of its own for each epoch.

    The order follows from seed and epoch alone, so that the place in the data is two numbers.

    Args:
        dataset: rows.
        batch_size: rows in a batch; the last batch of an epoch may have fewer.
        shuffle: whether the order is random.
        seed: of the order.

    Raises:
        ConfigError: if the batch size is below 1.
    """

    def __init__(
        self, dataset: InstructDataset, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: must be at least 1")
        self._dataset = dataset
        self._batch_size = batch_size
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

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the current place to the end of the epoch."""
        order = self._order()
        while self._position < len(order):
            chosen = order[self._position : self._position + self._batch_size]
            self._position += len(chosen)
            rows = [self._dataset[index] for index in chosen]
            yield collate(rows, self._dataset.pad_id, self._dataset.packed)

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
        names = {"fingerprint": _DATA, "batch_size": "batch_size", "shuffle": "shuffle"}
        names |= {"seed": "seed"}
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
