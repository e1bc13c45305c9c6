"""Rotary position embedding (Su et al. 2021)."""

import math

import torch
from torch import Tensor

from checkpointing.mapping.model_config import Llama3RopeScaling, ModelConfig


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair: ``theta ** (-2 i / rotary_dim)``, then scaled.

    Returns:
        fp32 ``[rotary_dim / 2]`` in radians per token, on the CPU even in a meta device context.
    """
    size = config.rotary_dim or config.dims.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is None:
        return frequencies
    return _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long waves by ``factor``, short ones not, those between in part."""
    wavelengths = 2 * math.pi / frequencies
    # How many waves fit into the original context, on the scale from low (0) to high (1).
    smooth = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at each position.

    Args:
        positions: integers ``[batch or 1, seq]``.
        frequencies: fp32 ``[head_dim / 2]``.

    Returns:
        Two fp32 tensors ``[batch or 1, seq, 1, head_dim / 2]``.
    """
    angles = positions[..., None, None].float() * frequencies
    return angles.cos(), angles.sin()


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
