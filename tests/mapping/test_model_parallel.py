import pytest
import torch

from checkpointing.errors import TensorMismatchError
from checkpointing.families.llama import LLAMA
from checkpointing.mapping.model_parallel import join
from checkpointing.mapping.tensors import StateDictSource


def test_a_shard_that_lacks_a_tensor_and_one_of_another_shape_are_listed():
    whole = {
        "layers.0.attention.wq.weight": torch.randn(6, 4),
        "layers.0.feed_forward.w2.weight": torch.randn(4, 10),
        "norm.weight": torch.randn(4),
    }
    other = {
        "layers.0.attention.wq.weight": torch.randn(6, 5),
        "norm.weight": torch.randn(3),
    }
    with pytest.raises(TensorMismatchError) as caught:
        join(LLAMA, "meta", 1, [StateDictSource(whole), StateDictSource(other)], 4, "shards")
    text = str(caught.value)
    assert "layers.0.feed_forward.w2.weight: not in every shard" in text
    assert "layers.0.attention.wq.weight: the shards are [6, 4] float32, [6, 5] float32" in text
    assert "norm.weight: the shards are [4] float32, [3] float32" in text


def test_a_replicated_tensor_that_differs_between_shards_is_refused():
    ranks = [StateDictSource({"norm.weight": torch.full((4,), float(rank))}) for rank in range(2)]
    whole, _ = join(LLAMA, "meta", 1, ranks, 4, "shards")
    with pytest.raises(TensorMismatchError, match=r"norm.weight: differs between the shards"):
        whole.read("norm.weight")
