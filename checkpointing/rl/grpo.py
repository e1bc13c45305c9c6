"""The objective of group relative policy optimisation.

Of Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), equations 3 and 4, with outcome rewards. For
a prompt with completions o_1 … o_G, of rewards r_1 … r_G, what is maximised is

    1/G sum_i 1/|o_i| sum_t ( min(q A_i, clip(q, 1 - e, 1 + e) A_i) - beta k3 )

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)
    q   = pi(o_it) / pi_sampled(o_it)
    k3  = pi_ref(o_it) / pi(o_it) - log(pi_ref(o_it) / pi(o_it)) - 1

where each pi is of a token given those before it. k3 (Schulman 2020, "Approximating KL divergence")
estimates KL(pi || pi_ref) without bias, and is never negative. Liu et al. 2025, "Understanding
R1-Zero-Like Training" (Dr. GRPO), leave out std(r), which weighs prompts on which the model nearly
always succeeds or fails more, and divide by the longest length there may be, not by |o_i|, which
weighs long wrong answers less.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpointing.errors import ConfigError

_EPS = 1e-4


@dataclass(frozen=True)
class Objective:
    """Settings of the objective; for Dr. GRPO, both ``normalize`` settings are ``False``.

    Attributes:
        clip_epsilon: e, beyond which a changed probability gains nothing.
        kl_coeff: beta, weight of the divergence from the reference.
        normalize_by_std: divide the advantages of a group by the standard deviation (of a sample,
            with G - 1) of its rewards.
        normalize_by_length: divide the sum over a completion's tokens by their number, not by the
            most that there may be.

    Raises:
        ConfigError: if a number is not possible.
    """

    clip_epsilon: float = 0.2
    kl_coeff: float = 0.04
    normalize_by_std: bool = True
    normalize_by_length: bool = True

    def __post_init__(self) -> None:
        if not self.clip_epsilon > 0:
            raise ConfigError(f"objective.clip_epsilon={self.clip_epsilon}: must be above 0")
        if not self.kl_coeff >= 0:
            raise ConfigError(f"objective.kl_coeff={self.kl_coeff}: must be at least 0")


@dataclass(frozen=True)
class Losses:
    """The negated objective, and what it is made of.

    Attributes:
        loss: fp32 ``[completions]``, of each completion.
        kl: fp32 ``[completions, seq]``, k3 of each token; 0 where there is none.
        clipped: boolean ``[completions, seq]``, tokens whose probability has changed so far in the
            direction of their advantage that they gain nothing more.
    """

    loss: Tensor
    kl: Tensor
    clipped: Tensor


def advantages(rewards: Tensor, normalize_by_std: bool = True) -> Tensor:
    """How much better each completion is than its group.

    Args:
        rewards: floating point ``[groups, G]``, G at least 2.
        normalize_by_std: divide by the standard deviation of the group.

    Returns:
        The same shape; exactly 0 for a group whose rewards are all the same.
    """
    # A mean of equal numbers may be rounded to another one; that of zeros is zero.
    shifted = rewards - rewards[:, :1]
    centred = shifted - shifted.mean(1, keepdim=True)
    return centred / (shifted.std(1, keepdim=True) + _EPS) if normalize_by_std else centred


def losses(
    policy: Tensor,
    sampled: Tensor,
    reference: Tensor,
    mask: Tensor,
    advantage: Tensor,
    objective: Objective,
    max_new_tokens: int,
) -> Losses:
    """The loss of each completion, which is to be averaged over all of them.

    Args:
        policy: fp32 ``[completions, seq]``, log-probabilities of the tokens by the model that is
            trained; a gradient flows to it.
        sampled: the same by the weights that the completions were sampled with.
        reference: the same by the reference.
        mask: boolean ``[completions, seq]``, the tokens that belong to a completion.
        advantage: fp32 ``[completions]``.
        objective: settings.
        max_new_tokens: the most tokens that a completion may have.
    """
    epsilon = objective.clip_epsilon
    ratio = torch.exp(policy - sampled)
    each = advantage[:, None]
    gain = torch.minimum(ratio * each, ratio.clamp(1 - epsilon, 1 + epsilon) * each)
    apart = reference - policy
    kl = torch.where(mask, torch.exp(apart) - apart - 1, 0.0)
    total = torch.where(mask, objective.kl_coeff * kl - gain, 0.0).sum(1)
    length = mask.sum(1).clamp(min=1) if objective.normalize_by_length else max_new_tokens
    up = (each > 0) & (ratio > 1 + epsilon)
    down = (each < 0) & (ratio < 1 - epsilon)
    return Losses(total / length, kl.detach(), mask & (up | down))
