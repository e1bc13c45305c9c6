import pytest
import torch

from checkpointing.errors import TensorMismatchError
from checkpointing.families.llama import LLAMA
from checkpointing.mapping.model_parallel import Cut, cut, join, join_cut
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
        join(LLAMA, "meta", [StateDictSource(whole), StateDictSource(other)], 4, "shards")
    text = str(caught.value)
    assert "layers.0.feed_forward.w2.weight: not in every shard" in text
    assert "layers.0.attention.wq.weight: the shards are [6, 4] float32, [6, 5] float32" in text
    assert "norm.weight: the shards are [4] float32, [3] float32" in text


def test_a_replicated_tensor_that_differs_between_shards_is_refused():
    ranks = [StateDictSource({"norm.weight": torch.full((4,), float(rank))}) for rank in range(2)]
    whole, _ = join(LLAMA, "meta", ranks, 4, "shards")
    with pytest.raises(TensorMismatchError, match=r"norm.weight: differs between the shards"):
        whole.read("norm.weight")


def test_parts_are_cut_each_by_itself_and_joined_again():
    # Gate is rows 0 to 5, up 6 to 11; at two ranks [g0 u0] and [g1 u1].
    fc1 = torch.arange(12 * 4.0).view(12, 4)
    whole = StateDictSource({"fc1": fc1, "fc2": torch.randn(4, 6), "norm": torch.randn(5)})
    cuts = {"fc1": Cut(0, parts=2), "fc2": Cut(1)}
    ranks = cut(whole, cuts, 2)
    assert torch.equal(ranks[0].read("fc1"), fc1[[0, 1, 2, 6, 7, 8]])
    assert torch.equal(ranks[1].read("fc1"), fc1[[3, 4, 5, 9, 10, 11]])
    assert torch.equal(ranks[1].read("fc2"), whole.read("fc2")[:, 3:])
    assert torch.equal(ranks[1].read("norm"), whole.read("norm"))
    joined = join_cut(ranks, cuts, "test")
    for name in whole.metas:
        assert joined.metas[name] == whole.metas[name]
        assert torch.equal(joined.read(name), whole.read(name))
        rows = joined.rows(name)
        step = max(rows.unit, 3)
        pieces = [rows.read(a, min(a + step, rows.count)) for a in range(0, rows.count, step)]
        assert torch.equal(torch.cat(pieces), rows.read_all())


def test_shards_that_have_no_whole_number_of_parts_are_refused():
    ranks = [StateDictSource({"fc1": torch.randn(5, 4)}) for _ in range(2)]
    with pytest.raises(TensorMismatchError, match=r"fc1: the shards are \[5, 4\]"):
        join_cut(ranks, {"fc1": Cut(0, parts=2)}, "test")


def test_a_model_in_one_file_is_read_a_few_rows_at_a_time():
    names = {"layers.0.attention.wq.weight": torch.randn(6, 4), "norm.weight": torch.randn(4)}
    whole, cuts = join(LLAMA, "meta", [StateDictSource(names)], 4, "shards")
    assert cuts == {}
    assert [whole.rows(name).unit for name in names] == [1, 1]
