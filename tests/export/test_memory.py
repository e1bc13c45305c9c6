"""Memory is given again when nobody holds a tensor in it, and not before."""

import pytest
import torch

from checkpointing.export.memory import Memory
from checkpointing.mapping.tensors import TensorMeta

MATRIX = TensorMeta((512, 1024), torch.float32)
SAME_SIZE = TensorMeta((1024, 1024), torch.bfloat16)


@pytest.fixture
def memory():
    return Memory(torch.device("cpu"), 3 * MATRIX.nbytes)


def test_what_was_let_go_of_is_given_again(memory):
    first = memory.empty(MATRIX)
    address = first.data_ptr()
    assert memory.empty(MATRIX).data_ptr() != address
    del first
    again = memory.empty(SAME_SIZE)
    assert again.data_ptr() == address
    assert (again.shape, again.dtype) == ((1024, 1024), torch.bfloat16)


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[3],
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        torch.utils.dlpack.to_dlpack,
    ],
)
def test_what_is_held_through_anything_else_is_not(memory, hold):
    tensor = memory.empty(MATRIX)
    address, held = tensor.data_ptr(), hold(tensor)
    del tensor
    kept = [memory.empty(MATRIX) for _ in range(5)]
    assert address not in {one.data_ptr() for one in kept}
    del held


def test_no_more_is_kept_than_was_said(memory):
    kept = [memory.empty(MATRIX).fill_(number) for number in range(5)]
    assert len(memory._maps) == 3
    assert [float(one[7, 9]) for one in kept] == [0, 1, 2, 3, 4]
