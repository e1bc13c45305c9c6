"""Rotary position embedding (Su et al. 2021), and its scalings to longer contexts."""

import math

import torch
from torch import Tensor

from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.rope_scaling import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)


class RotaryEmbedding:
    """The rotary positions of all layers of one kind.

    Not a module: the frequencies must stay fp32 when the model is cast, and be real when it is
    built on the meta device.

    Args:
        config: of the model.
        sliding: the positions of the layers that slide their window, where they have their own.
    """

    def __init__(self, config: ModelConfig, *, sliding: bool = False) -> None:
        scaling = _theta_and_scaling(config, sliding)[1]
        # Documents of more tokens have the second row of the frequencies.
        self._boundary: int | None = None
        lengths = [1]
        if isinstance(scaling, LongRopeScaling):
            self._boundary = scaling.original_max_seq_len
            lengths.append(self._boundary + 1)
        self._frequencies = torch.stack(
            [rope_frequencies(config, sliding=sliding, length=length) for length in lengths]
        )
        self._attention_factor = attention_factor(scaling)

    def angles(self, positions: Tensor, document_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine at each position, as they are for each document by itself.

        Args:
            positions: in the token's document, integers ``[batch or 1, seq]``.
            document_ids: integers ``[batch, seq]``, each the same for all tokens of a document;
                ``None``: each row is one document.

        Returns:
            As :func:`rotation`.
        """
        self._frequencies = self._frequencies.to(positions.device)
        frequencies = self._frequencies[0]
        if self._boundary is not None and positions.shape[-1] > self._boundary:
            if document_ids is None:
                frequencies = self._frequencies[1]
            else:
                same = document_ids[:, :, None] == document_ids[:, None, :]
                is_long = same.sum(-1) > self._boundary
                frequencies = self._frequencies[is_long.long()][:, :, None]
        return rotation(positions, frequencies, self._attention_factor)


def _theta_and_scaling(config: ModelConfig, sliding: bool) -> tuple[float, RopeScaling | None]:
    if sliding and config.sliding_rope_theta is not None:
        return config.sliding_rope_theta, config.sliding_rope_scaling
    assert config.rope_theta is not None  # build_decoder refuses models without rotary positions
    return config.rope_theta, config.rope_scaling


def rope_frequencies(config: ModelConfig, *, sliding: bool = False, length: int = 1) -> Tensor:
    """Angle per position of each pair: ``theta ** (-2 i / rotary_dim)``, then scaled.

    Args:
        config: of the model.
        sliding: those of the layers that slide their window.
        length: of the sequence, in tokens. It counts in LongRoPE alone: dynamic scaling changes
            nothing in sequences of up to ``config.max_seq_len`` tokens.

    Returns:
        fp32 ``[rotary_dim / 2]`` in radians per token, on the CPU even in a meta device context.
    """
    theta, scaling = _theta_and_scaling(config, sliding)
    size = config.rotary_dim or config.dims.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    # Every rounding is as in transformers: over a context of 128k tokens, one bit in the angle per
    # token grows to a hundredth of a radian.
    tokens_per_radian = theta**exponents
    match scaling:
        case LinearRopeScaling():
            return 1.0 / tokens_per_radian / scaling.factor
        case Llama3RopeScaling():
            return _scale_llama3(1.0 / tokens_per_radian, scaling)
        case YarnRopeScaling():
            return _scale_yarn(tokens_per_radian, scaling, theta, size)
        case LongRopeScaling():
            is_long = length > scaling.original_max_seq_len
            factors = scaling.long_factor if is_long else scaling.short_factor
            stretch = torch.tensor(factors, dtype=torch.float32, device="cpu")
            return 1.0 / (stretch * tokens_per_radian)
    return 1.0 / tokens_per_radian


def _scale_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long waves by ``factor``, short ones not, those between in part."""
    wavelengths = 2 * math.pi / frequencies
    # How many waves fit into the original context, on the scale from low (0) to high (1).
    smooth = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _scale_yarn(
    tokens_per_radian: Tensor, scaling: YarnRopeScaling, theta: float, size: int
) -> Tensor:
    """YaRN's "NTK-by-parts" (Peng et al. 2023, section 3.2), with a ramp over the pairs' numbers.

    The bounds of the ramp are the authors' code's (https://github.com/jquesnelle/yarn).
    """

    def pair_that_turns(times: float) -> float:
        # Solved for i: original_max_seq_len * theta ** (-2 i / size) = 2 pi times.
        waves = scaling.original_max_seq_len / (2 * math.pi * times)
        return size * math.log(waves) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    ramp = (torch.arange(len(tokens_per_radian), device="cpu").float() - low) / width
    kept = 1 - ramp.clamp(0.0, 1.0)
    stretched = 1.0 / (scaling.factor * tokens_per_radian)
    return stretched * (1 - kept) + 1.0 / tokens_per_radian * kept


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cosine and sine are multiplied with; so attention's products are with its square.

    YaRN: Peng et al. 2023, section 3.4, and with two weights as in DeepSeek-V2's code. LongRoPE:
    as in Phi-3's code (https://huggingface.co/microsoft/Phi-3-mini-128k-instruct).
    """
    if not isinstance(scaling, YarnRopeScaling | LongRopeScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    growth = math.log(scaling.factor)
    if isinstance(scaling, LongRopeScaling):
        return math.sqrt(1 + growth / math.log(scaling.original_max_seq_len))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * growth + 1) / (0.1 * scaling.mscale_all_dim * growth + 1)
    return 0.1 * growth + 1


def rotation(
    positions: Tensor, frequencies: Tensor, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at each position.

    Args:
        positions: integers ``[batch or 1, seq]``.
        frequencies: fp32 ``[rotary_dim / 2]``, or ``[batch, seq, 1, rotary_dim / 2]``.
        attention_factor: both are multiplied with it.

    Returns:
        Two fp32 tensors ``[batch or 1, seq, 1, rotary_dim / 2]``.
    """
    angles = positions[..., None, None].float() * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = False) -> Tensor:
    """Rotates each pair of a head by its angle, in fp32.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        cos: from :func:`rotation`.
        sin: from :func:`rotation`.
        halves: a pair is an element of the head's first half and the one at the same place in the
            second, as in Hugging Face's code; otherwise two neighbours, as in Meta's.

    Returns:
        Shape and dtype of ``x``.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = rotate(x[..., :rotary_dim], cos, sin, halves=halves)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    split, dim = ((2, -1), -2) if halves else ((-1, 2), -1)
    first, second = x.float().unflatten(-1, split).unbind(dim)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=dim)
    return rotated.flatten(-2).type_as(x)
