"""Whether two tensors are the same, bit for bit, and how much is read to tell."""

import pytest
import torch
from torch import Tensor

from checkpointing.mapping.tensors import LazyTensors, Rows, meta_of
from checkpointing.mapping.ties import same_tensors

# 70 MB, so that more than the first rows and more than one block are compared.
ROWS, WIDTH = 35_011, 503


def source_of(first: Tensor, second: Tensor, unit: int = 1) -> tuple[LazyTensors, list[int]]:
    """A source of copies, of which it notes how many rows are read."""
    read: list[int] = []

    def rows(tensor: Tensor) -> Rows:
        def part(start: int, stop: int) -> Tensor:
            assert start % unit == 0
            read.append(stop - start)
            return tensor[start:stop].clone()

        return Rows(len(tensor), unit, part)

    tensors = {"a": first, "b": second}
    metas = {name: meta_of(tensor) for name, tensor in tensors.items()}
    return LazyTensors(metas, {"a": lambda: rows(first), "b": lambda: rows(second)}), read


@pytest.mark.parametrize("unit", [1, 7, ROWS])
def test_copies_are_the_same_and_all_of_them_is_compared(unit):
    tensor = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    source, read = source_of(tensor, tensor, unit)
    assert same_tensors(source, "a", "b")
    assert sum(read) == 2 * ROWS

    other = tensor.clone()
    other[-1, -1] += 1
    source, _ = source_of(tensor, other, unit)
    assert not same_tensors(source, "a", "b")


def test_of_different_tensors_the_first_rows_tell():
    tensor = torch.ones(ROWS, WIDTH)
    source, read = source_of(tensor, tensor + 1)
    assert not same_tensors(source, "a", "b")
    assert sum(read) < ROWS / 100


def test_zeros_of_both_signs_differ_and_equal_nans_do_not():
    zeros, nans = torch.zeros(3, 5), torch.full((3, 5), float("nan"))
    assert not same_tensors(source_of(zeros, -zeros)[0], "a", "b")
    assert same_tensors(source_of(nans, nans)[0], "a", "b")


@pytest.mark.parametrize("other", [torch.zeros(5, 3), torch.zeros(3, 5, dtype=torch.float16)])
def test_shape_and_dtype_are_compared(other):
    source, read = source_of(torch.zeros(3, 5), other)
    assert not same_tensors(source, "a", "b")
    assert not read


def test_views_of_the_same_memory_are_not_read_through():
    tensor = torch.ones(ROWS, WIDTH)
    blocks: list[int] = []

    def part(start: int, stop: int) -> Tensor:
        blocks.append(stop)
        return tensor[start:stop]

    metas = dict.fromkeys("ab", meta_of(tensor))
    source = LazyTensors(metas, dict.fromkeys("ab", lambda: Rows(ROWS, 1, part)))
    assert same_tensors(source, "a", "b")
    assert len(blocks) == 2
