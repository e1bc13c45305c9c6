"""LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024) on a token embedding."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.storage.local_part import whole
from checkpointing.training.adapter_switch import Switched


class LoRAEmbedding(Switched, nn.Module):
    """A frozen embedding with a trained low-rank update: ``W[t] + scale * (B A)[:, t]``, token t.

    Seen as a linear map of one-hot tokens, an embedding takes the same A and B as a linear layer.
    They are fp32 whatever the dtype of ``W``. As in PEFT, ``A`` starts at zero, ``B`` is random and
    nothing is dropped.

    Args:
        base: its weight ``[vocab, hidden]`` is taken over and frozen.
        rank: rows of ``A [rank, vocab]`` and columns of ``B [hidden, rank]``.
        scale: factor of the update.
    """

    def __init__(self, base: nn.Embedding, rank: int, scale: float) -> None:
        super().__init__()
        self.weight = base.weight.requires_grad_(False)
        self.scale = scale
        self.lora_embedding_a, self.lora_embedding_b = _fresh_pair(
            base.num_embeddings, rank, base.embedding_dim, base.weight.device
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids ``[...]`` to vectors ``[..., hidden]`` of the weight's dtype."""
        found = F.embedding(tokens, self.weight)
        return (found + self._update(tokens)).type_as(found) if self.adapter_is_on else found

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's own parameters, by their names in this module."""
        yield "lora_embedding_a.weight", self.lora_embedding_a.weight
        yield "lora_embedding_b.weight", self.lora_embedding_b.weight

    def fresh_values(self) -> dict[str, Tensor]:
        """What :meth:`adapter_parameters` start as, whole, drawn anew as the constructor draws."""
        a, b = self.lora_embedding_a, self.lora_embedding_b
        a, b = _fresh_pair(a.in_features, a.out_features, b.out_features, a.weight.device)
        return {"lora_embedding_a.weight": a.weight, "lora_embedding_b.weight": b.weight}

    def _update(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.lora_embedding_a.weight.T)
        return self.scale * F.linear(rows, self.lora_embedding_b.weight)


class DoRAEmbedding(LoRAEmbedding):
    """A frozen embedding whose direction and norms are trained apart.

    ``m / ||W + scale * (B A)^T|| * (W[t] + scale * (B A)[:, t])``: the norm is over the vocabulary,
    one for each element of a vector, which is the output of the linear map. It is a constant to the
    gradient (section 4.3 of the paper).

    Args:
        base: as for :class:`LoRAEmbedding`; its norms are the first magnitudes ``m [hidden]``.
        rank: as for :class:`LoRAEmbedding`.
        scale: as for :class:`LoRAEmbedding`.
    """

    def __init__(self, base: nn.Embedding, rank: int, scale: float) -> None:
        super().__init__(base, rank, scale)
        self.lora_embedding_magnitude = nn.Parameter(_norms_of(base.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids ``[...]`` to vectors ``[..., hidden]`` of the weight's dtype."""
        if not self.adapter_is_on:
            return F.embedding(tokens, self.weight)
        ratio = self.lora_embedding_magnitude / self._norms()
        found = F.embedding(tokens, self.weight) + self._update(tokens)
        return (ratio * found).type_as(self.weight)

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's own parameters, by their names in this module."""
        yield from super().adapter_parameters()
        yield "lora_embedding_magnitude", self.lora_embedding_magnitude

    def fresh_values(self) -> dict[str, Tensor]:
        """What :meth:`adapter_parameters` start as, whole; all ranks must call this together."""
        norms = _norms_of(whole(self.weight))
        return {**super().fresh_values(), "lora_embedding_magnitude": norms}

    @torch.no_grad()
    def _norms(self) -> Tensor:
        a, b = self.lora_embedding_a.weight, self.lora_embedding_b.weight
        return torch.add(self.weight.to(a.dtype), (b @ a).T, alpha=self.scale).norm(dim=0)


def _fresh_pair(
    vocab: int, rank: int, hidden: int, device: torch.device
) -> tuple[nn.Linear, nn.Linear]:
    """A and B as they start."""
    own: dict[str, Any] = {"device": device, "dtype": torch.float32}
    a = nn.Linear(vocab, rank, bias=False, **own)
    b = nn.Linear(rank, hidden, bias=False, **own)
    nn.init.zeros_(a.weight)
    nn.init.normal_(b.weight)
    return a, b


def _norms_of(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float32).norm(dim=0)
