from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.mapping.axis_ops import NotRepresentableError, RopeOrder, TilesByAspectRatio
from checkpointing.mapping.model_config import Dims


def dims(heads: int, head_dim: int) -> Dims:
    return Dims(layers=1, vocab=3, hidden=5, ffn=7, heads=heads, kv_heads=1, head_dim=head_dim)


def test_rope_order_of_two_heads_of_width_six_is_the_one_computed_by_hand():
    # Native rows 2i and 2i+1 of a head turn together; Hugging Face's are i and i + 3.
    native = torch.arange(12.0)
    foreign = RopeOrder().to_foreign(native, 0, dims(2, 6))
    assert foreign.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_rope_order_turns_the_same_angle_in_both_layouts():
    # Su et al. 2021: pair i of a head is turned by the angle p * theta_i.
    head_dim = 10
    half = head_dim // 2
    native = torch.randn(head_dim, dtype=torch.float64)
    angles = torch.rand(half, dtype=torch.float64)
    even, odd = native[0::2], native[1::2]
    turned = torch.stack(
        [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], 1
    ).flatten()

    op = RopeOrder()
    foreign = op.to_foreign(native, 0, dims(1, head_dim))
    first, second = foreign[:half], foreign[half:]
    foreign_turned = torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    )
    assert torch.equal(op.to_native(foreign_turned, 0, dims(1, head_dim)), turned)


@given(
    heads=st.integers(1, 5),
    half=st.integers(1, 6),
    before=st.lists(st.integers(1, 4), max_size=2),
    after=st.lists(st.integers(1, 4), max_size=2),
)
def test_rope_order_undoes_itself_along_any_dimension(heads, half, before, after):
    sizes = dims(heads, 2 * half)
    tensor = torch.randn([*before, heads * 2 * half, *after])
    op = RopeOrder()
    dim = len(before)
    foreign = op.to_foreign(tensor, dim, sizes)
    assert torch.equal(op.to_native(foreign, dim, sizes), tensor)
    assert torch.equal(op.to_foreign(op.to_native(tensor, dim, sizes), dim, sizes), tensor)


TILES = TilesByAspectRatio("tiles", "aspect_ratios", "vision_hidden")


def tiled(tiles: int, *shapes: tuple[int, int]) -> SimpleNamespace:
    return SimpleNamespace(tiles=tiles, aspect_ratios=shapes, vision_hidden=1)


def test_the_tiles_of_two_shapes_are_listed_as_computed_by_hand():
    # Rows and columns of a grid of two by two tiles; no image has a second row and column.
    native = torch.tensor([[1.0, 2.0], [3.0, 0.0]])[:, :, None, None]
    foreign = TILES.to_foreign(native, tiled(2, (1, 2), (2, 1)))
    assert foreign.tolist() == [[0, 0], [1, 2], [1, 3]]
    assert torch.equal(TILES.to_native(foreign, tiled(2, (1, 2), (2, 1))), native)


def test_a_grid_of_several_rows_is_listed_row_by_row():
    native = torch.zeros(4, 4, 1, 1)
    native[:2, :2, 0, 0] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert TILES.to_foreign(native, tiled(4, (2, 2)))[1].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "foreign",
    [
        [[0, 0], [1, 2], [5, 3]],  # tile (0, 0) twice
        [[7, 0], [1, 2], [1, 3]],  # a tile of no image
        [[-0.0, 0], [1, 2], [1, 3]],  # which would come back as another zero
    ],
)
def test_lists_of_which_something_would_be_lost_are_refused(foreign):
    with pytest.raises(NotRepresentableError, match="the same tile has other values"):
        TILES.to_native(torch.tensor(foreign), tiled(2, (1, 2), (2, 1)))


def test_a_tile_that_no_image_has_is_refused_unless_it_is_zero():
    native = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:, :, None, None]
    with pytest.raises(NotRepresentableError, match="not zero for tiles that no image has"):
        TILES.to_foreign(native, tiled(2, (1, 2), (2, 1)))
