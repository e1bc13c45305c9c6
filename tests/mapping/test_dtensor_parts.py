"""Parts of tensors as torch itself says that it cuts them."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from checkpointing.mapping.dtensor_parts import part_at


@st.composite
def cut_tensors(draw):
    """A whole shape, a mesh, a place in it, and placements of no cut over a cut."""
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    place = [draw(st.integers(0, size - 1)) for size in mesh]
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, place, [draw(placement) for _ in mesh]


def by_torch(shape, mesh, place, placements):
    """The same part as torch has it; ``None`` for one that is empty."""
    lengths, starts = _compute_local_shape_and_global_offset(shape, mesh, place, placements)
    ranges = zip(starts, lengths, strict=True)
    return tuple(slice(a, a + n) for a, n in ranges) if prod(lengths) else None


@given(cut_tensors())
def test_a_part_is_that_of_torch(case):
    found, expected = part_at(*case), by_torch(*case)
    if expected is None:
        assert any(each.start == each.stop for each in found)
    else:
        assert found == expected


@given(st.integers(2, 4), st.integers(2, 4), st.integers(1, 5), st.data())
def test_a_part_that_fsdp_has_cut_after_tensor_parallelism_is_that_of_torch(dp, tp, rows, data):
    shape, mesh = (dp * tp * rows, 7), (dp, tp)
    place = [data.draw(st.integers(0, size - 1)) for size in mesh]
    placements = [_StridedShard(0, split_factor=tp), Shard(0)]
    found = part_at(shape, mesh, place, placements)
    assert found == by_torch(shape, mesh, place, placements)
    # By hand: tensor parallelism's part first, and FSDP's within it.
    assert found[0].start == place[1] * dp * rows + place[0] * rows


@pytest.mark.parametrize(
    "placements",
    [
        [Partial(), Shard(0), Replicate()],
        [_StridedShard(0, split_factor=5), Shard(0), Replicate()],
        [_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)],
    ],
    ids=["a sum", "strides of another mesh", "strides in strides"],
)
def test_what_torch_may_cut_otherwise_is_not_known(placements):
    assert part_at((60, 7), (4, 3, 2), (1, 2, 0), placements) is None
