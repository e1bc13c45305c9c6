"""Which part of a whole tensor a process has, where torch has cut it (``DTensor``)."""

from collections.abc import Sequence
from math import prod
from typing import Any


def part_at(
    shape: Sequence[int], mesh: Sequence[int], place: Sequence[int], placements: Sequence[Any]
) -> tuple[slice, ...] | None:
    """The range of each dimension that the process at a place of a mesh has; nothing is sent.

    Args:
        shape: of the whole tensor.
        mesh: its shape.
        place: of the process in it.
        placements: of the tensor, one for each dimension of the mesh: cut along a dimension in
            chunks, or after that by FSDP2 along the same dimension again.

    Returns:
        The ranges; ``None`` if it is not known here how torch cuts so.
    """
    starts, lengths = [0] * len(shape), list(shape)
    cuts = [
        (along, cut)
        for along, cut in enumerate(placements)
        if mesh[along] > 1 and not cut.is_replicate()
    ]
    # FSDP cuts what tensor parallelism has cut before, along a later dimension of the mesh.
    for along, cut in sorted(cuts, key=lambda each: is_strided(each[1])):
        dim = getattr(cut, "dim", None)
        if dim is None:
            return None
        if is_strided(cut):
            same = [(a, c) for a, c in cuts if a != along and c.dim == dim]
            before = [mesh[a] for a, _ in same if a > along]
            if cut.split_factor != prod(before) or any(is_strided(c) for _, c in same):
                return None
        # As torch.chunk cuts: the last parts may be shorter, or empty.
        chunk = -(-lengths[dim] // mesh[along])
        skipped = min(place[along] * chunk, lengths[dim])
        starts[dim] += skipped
        lengths[dim] = min(chunk, lengths[dim] - skipped)
    return tuple(slice(a, a + length) for a, length in zip(starts, lengths, strict=True))


def is_strided(placement: object) -> bool:
    """Whether it is FSDP2's cut of a dimension that tensor parallelism has cut before."""
    # By its name: its class is torch's own business, and has moved.
    return type(placement).__name__ == "_StridedShard"
