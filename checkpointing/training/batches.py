"""Batches of tokenised conversations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpointing.training.data import InstructDataset, TokenRow
from checkpointing.training.distributed import DataShare
from checkpointing.training.row_loader import RowLoader
from checkpointing.training.tokenizer import IGNORED


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
        rows: if there are none, the batch is a row of padding, of which nothing is learnt: a
            process that has nothing to do still takes its part in what all do together.
        pad_id: token id of the padding.
        packed: give the positions and numbers of the conversations too.
    """
    size = (max(1, len(rows)), max((len(row.tokens) for row in rows), default=1))
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


class BatchLoader(RowLoader):
    """Goes through tokenised conversations; a batch is a :class:`Batch`, padded.

    Args:
        dataset: rows.
        batch_size: rows in a batch; the last batch of an epoch may have fewer.
        shuffle: whether the order is random.
        seed: of the order.
        share: as for :class:`RowLoader`.

    Raises:
        ConfigError: if the batch size is below 1.
    """

    def __init__(
        self,
        dataset: InstructDataset,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        share: DataShare | None = None,
    ) -> None:
        super().__init__(dataset, batch_size, shuffle, seed, share)
        self._pad_id = dataset.pad_id
        self._packed = dataset.packed

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the current place to the end of the epoch."""
        for rows in super().__iter__():
            yield collate(rows, self._pad_id, self._packed)
