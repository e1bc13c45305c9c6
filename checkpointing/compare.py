"""Two sets of tensors, one tensor at a time."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpointing.mapping.tensors import TensorMeta, TensorSource
from checkpointing.progress import bytes_progress


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same, bit for bit, in A and B.

    Attributes:
        name: its name.
        a: shape and dtype in A, ``None`` if it is not there.
        b: shape and dtype in B, ``None`` if it is not there.
        largest: largest ``|A - B|``; ``None`` if the shapes differ.
        relative: ``‖A - B‖ / ‖A‖``, Frobenius; ``None`` if the shapes differ.
    """

    name: str
    a: TensorMeta | None
    b: TensorMeta | None
    largest: float | None = None
    relative: float | None = None


def differences(a: TensorSource, b: TensorSource) -> list[Difference]:
    """All tensors that are not the same, the largest relative difference first.

    One tensor of each is in memory at a time. What cannot be measured (missing in one, or of
    another shape) comes before all.
    """
    found = [
        Difference(name, a.metas.get(name), b.metas.get(name))
        for name in dict.fromkeys((*a.metas, *b.metas))
        if name not in a.metas or name not in b.metas or a.metas[name].shape != b.metas[name].shape
    ]
    unlike = {difference.name for difference in found}
    both = [name for name in a.metas if name not in unlike]
    with bytes_progress("comparing", sum(a.metas[name].nbytes for name in both)) as progress:
        for name in both:
            first, second = a.read(name), b.read(name)
            if first.dtype != second.dtype or not _same_bits(first, second):
                sizes = _measure(first, second)
                found.append(Difference(name, a.metas[name], b.metas[name], *sizes))
            progress(a.metas[name].nbytes)
    return sorted(found, key=_size, reverse=True)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    first, second = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    return torch.equal(first, second)


def _measure(a: Tensor, b: Tensor) -> tuple[float, float]:
    if a.numel() == 0:
        return 0.0, 0.0
    narrow = a.dtype.itemsize < 4 and b.dtype.itemsize < 4
    dtype = torch.float32 if narrow else torch.float64
    first = a.to(dtype)
    gap = first - b.to(dtype)
    norm, size = (
        float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in (gap, first)
    )
    relative = norm / size if size else (math.inf if norm else 0.0)
    return float(gap.abs().max()), relative


def _size(difference: Difference) -> float:
    if difference.relative is None or math.isnan(difference.relative):
        return math.inf
    return difference.relative
