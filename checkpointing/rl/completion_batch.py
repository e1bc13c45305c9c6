"""Completions with their prompts as padded tensors, and their log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpointing.export.engines.base import Completion
from checkpointing.training.decoder import TransformerDecoder


@dataclass(frozen=True)
class CompletionBatch:
    """Prompts and completions, padded on the right to one length.

    Attributes:
        tokens: int64 ``[completions, seq]``.
        mask: boolean ``[completions, seq - 1]``: the token after this one is of the completion.
    """

    tokens: Tensor
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """int64 ``[completions]``, tokens of each without the prompt."""
        return self.mask.sum(1)

    def rows(self, start: int, stop: int) -> "CompletionBatch":
        """Some of the completions."""
        return CompletionBatch(self.tokens[start:stop], self.mask[start:stop])


def completion_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    device: torch.device,
    rows: int | None = None,
) -> CompletionBatch:
    """A batch of completions, each with its prompt.

    Padding comes last and attention is causal, so that no token sees it.

    Args:
        prompts: token ids of the prompt of each completion.
        completions: the completions.
        device: of the tensors.
        rows: of the batch; those after the completions are padding, of which nothing is learnt, so
            that a process that has less to do takes its part in what all do together.
    """
    lengths = [len(p) + len(c.tokens) for p, c in zip(prompts, completions, strict=True)]
    size = (len(lengths) if rows is None else rows, max(lengths, default=2))
    tokens = torch.zeros(size, dtype=torch.int64)
    mask = torch.zeros(size[0], size[1] - 1, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens[row, : lengths[row]] = torch.tensor([*prompt, *completion.tokens])
        mask[row, len(prompt) - 1 : lengths[row] - 1] = True
    return CompletionBatch(tokens.to(device), mask.to(device))


def completion_logprobs(model: TransformerDecoder, batch: CompletionBatch) -> Tensor:
    """Log-probabilities of the completions' tokens, at temperature 1.

    Returns:
        fp32 ``[completions, seq - 1]``; 0 where there is no token of a completion.
    """
    logits = model(batch.tokens, wanted=F.pad(batch.mask, (0, 1)))
    targets = batch.tokens[:, 1:][batch.mask]
    found = -F.cross_entropy(logits.float(), targets, reduction="none")
    return torch.zeros(batch.mask.shape, device=found.device).masked_scatter(batch.mask, found)
