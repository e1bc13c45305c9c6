"""Mixture-of-experts feed-forward layers (Shazeer et al. 2017), with and without an adapter."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.training.adapter_switch import Switched

Activation = Callable[[Tensor], Tensor]


class GroupedExperts(nn.Module):
    """Gated feed-forward layers of all experts, each ``down(act(gate x) * up x)``.

    The weights are stacked, and laid out as torchtune has them: ``gate_proj`` and ``up_proj``
    ``[experts, hidden, ffn]``, ``down_proj`` ``[experts, ffn, hidden]``.
    """

    def __init__(self, experts: int, hidden: int, ffn: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.down_proj = nn.Parameter(torch.empty(experts, ffn, hidden))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """Maps ``[tokens, hidden]``, sorted by expert, to the same shape.

        Args:
            x: the tokens of the first expert, then those of the second, and so on.
            counts: how many tokens each expert has.
        """
        parts = []
        for expert, tokens in enumerate(x.split(counts)):
            if counts[expert]:
                gate = self.activation(self._project("gate", tokens, expert))
                inner = gate * self._project("up", tokens, expert)
                parts.append(self._project("down", inner, expert))
        return torch.cat(parts)

    def _project(self, stem: str, x: Tensor, expert: int) -> Tensor:
        return x @ getattr(self, f"{stem}_proj")[expert]


@dataclass(frozen=True)
class ExpertsAdapter:
    """Settings of the adapter on one of the three projections."""

    rank: int
    scale: float


class LoRAGroupedExperts(Switched, GroupedExperts):
    """Frozen experts with a trained low-rank update of each: ``W x + scale * B A x``.

    ``A [experts, in, rank]`` and ``B [experts, rank, out]`` are fp32, and named as in torchtune:
    ``lora_gate_a``, ``lora_gate_b`` and so on.

    Args:
        base: its weights are taken over and frozen.
        adapters: by the projection's name, such as ``gate_proj``.
        dropout: probability of dropping an input element of ``A`` in training.
    """

    def __init__(
        self, base: GroupedExperts, adapters: Mapping[str, ExpertsAdapter], dropout: float
    ) -> None:
        nn.Module.__init__(self)
        self.activation = base.activation
        self.dropout = nn.Dropout(dropout)
        self.scales: dict[str, float] = {}
        for name, parameter in base.named_parameters():
            setattr(self, name, parameter.requires_grad_(False))
        for name, adapter in adapters.items():
            stem = name.removesuffix("_proj")
            weight = getattr(base, name)
            experts, in_, out = weight.shape
            self.scales[stem] = adapter.scale
            a, b = _fresh_pair(experts, in_, adapter.rank, out, weight.device)
            setattr(self, f"lora_{stem}_a", nn.Parameter(a))
            setattr(self, f"lora_{stem}_b", nn.Parameter(b))

    def adapter_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The adapter's own parameters, by their names in this module."""
        for name, parameter in self.named_parameters():
            if name.startswith("lora_"):
                yield name, parameter

    def fresh_values(self) -> dict[str, Tensor]:
        """What :meth:`adapter_parameters` start as, whole, drawn anew as the constructor draws."""
        values: dict[str, Tensor] = {}
        for stem in self.scales:
            a, b = (getattr(self, f"lora_{stem}_{part}") for part in "ab")
            experts, in_, rank = a.shape
            fresh = _fresh_pair(experts, in_, rank, b.shape[-1], a.device)
            values |= {f"lora_{stem}_{part}": one for part, one in zip("ab", fresh, strict=True)}
        return values

    def _project(self, stem: str, x: Tensor, expert: int) -> Tensor:
        result = super()._project(stem, x, expert)
        if stem not in self.scales or not self.adapter_is_on:
            return result
        a, b = (getattr(self, f"lora_{stem}_{part}")[expert].type_as(x) for part in "ab")
        return result + self.scales[stem] * (self.dropout(x) @ a @ b)


def _fresh_pair(
    experts: int, in_: int, rank: int, out: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A and B as they start: A as a linear layer's, uniform with the bound 1 / sqrt(in)."""
    a = torch.empty(experts, in_, rank, device=device).uniform_(-1, 1) / math.sqrt(in_)
    return a, torch.zeros(experts, rank, out, device=device)


class Router(nn.Module):
    """Chooses the experts of each token: those with the highest probability.

    Args:
        gate: maps a token to a score for each expert.
        per_token: number of experts that a token goes to.
        normalize: the weights of a token's experts sum to 1.
    """

    def __init__(self, gate: nn.Module, per_token: int, normalize: bool) -> None:
        super().__init__()
        self.gate = gate
        self.per_token = per_token
        self.normalize = normalize

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, of the dtype of ``x [tokens, hidden]``, and experts; ``[tokens, per_token]``."""
        probabilities = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.type_as(x), chosen


class MixtureOfExperts(nn.Module):
    """Sends each token through the experts that the router chooses, and sums what they give."""

    def __init__(self, router: Router, experts: GroupedExperts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., hidden]`` to the same shape."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.experts.gate_proj.shape[0]).tolist()
        sent = tokens[by_expert // chosen.shape[1]]
        returned = self.experts(sent, counts)
        # Back in the order of the tokens; a sum in a fixed order, so that it is the same each time.
        outputs = torch.empty_like(returned).index_copy(0, by_expert, returned)
        mixed = (outputs.unflatten(0, chosen.shape) * weights[..., None]).sum(1)
        return mixed.view_as(x)
