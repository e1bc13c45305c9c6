from array import array

import pytest
import torch

from checkpointing.errors import ConfigError
from checkpointing.training import BatchLoader, DataShare, InstructDataset
from checkpointing.training.batches import collate
from checkpointing.training.data import TokenRow


def row(*lengths, start=10):
    tokens = array("i", range(start, start + sum(lengths)))
    labels = array("i", tokens)
    labels[0] = -100
    return TokenRow(tokens, labels, lengths)


@pytest.fixture
def dataset(tokenizer, tmp_path):
    lines = (f'{{"instruction": "{n}", "output": "{n * n}"}}\n' for n in range(11))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(lines))
    return InstructDataset(tokenizer, path)


def rows_of(batches, pad_id):
    """The rows handed out, without padding."""
    return [
        tuple(t for t in tokens.tolist() if t != pad_id) for b in batches for tokens in b.tokens
    ]


def test_rows_are_padded_on_the_right():
    batch = collate([row(3), row(5, start=20)], pad_id=7, packed=False)
    assert batch.tokens.tolist() == [[10, 11, 12, 7, 7], [20, 21, 22, 23, 24]]
    assert batch.labels.tolist() == [[-100, 11, 12, -100, -100], [-100, 21, 22, 23, 24]]
    assert (batch.input_pos, batch.document_ids, batch.num_tokens) == (None, None, 8)


def test_packed_rows_have_positions_and_numbers_of_their_conversations():
    batch = collate([row(2, 3), row(4, 1, 2)], pad_id=7, packed=True)
    assert batch.input_pos.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 0, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 1, -1, -1], [0, 0, 0, 0, 1, 2, 2]]


def test_an_epoch_hands_out_every_row_once_in_an_order_of_its_own(dataset):
    loader = BatchLoader(dataset, batch_size=4, seed=3)
    assert len(loader) == 3
    orders = []
    for epoch in range(3):
        loader.start_epoch(epoch)
        batches = list(loader)
        assert [len(batch.tokens) for batch in batches] == [4, 4, 3]
        orders.append(rows_of(batches, dataset.pad_id))
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert len(set(orders[0])) == 11


def test_the_order_follows_from_the_seed(dataset):
    orders = [rows_of(BatchLoader(dataset, 4, seed=s), dataset.pad_id) for s in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    plain = rows_of(BatchLoader(dataset, 4, shuffle=False), dataset.pad_id)
    assert plain == rows_of([collate([dataset[i]], 0, False) for i in range(11)], dataset.pad_id)


def test_a_saved_place_is_taken_up_again_exactly(dataset):
    loader = BatchLoader(dataset, batch_size=2, seed=3)
    loader.start_epoch(1)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    rest = rows_of(batches, dataset.pad_id)
    torch.manual_seed(99)
    again = BatchLoader(dataset, batch_size=2, seed=3)
    again.load_state_dict(state)
    assert rows_of(again, dataset.pad_id) == rest
    assert len(rest) == 7


def test_a_place_within_other_data_is_refused_but_not_one_between_epochs(
    dataset, tokenizer, tmp_path
):
    path = tmp_path / "other.jsonl"
    path.write_text('{"instruction": "x", "output": "y"}\n')
    loader = BatchLoader(dataset, batch_size=2, seed=3)
    other = BatchLoader(InstructDataset(tokenizer, path), batch_size=2, seed=3)
    loader.start_epoch(2)
    other.load_state_dict(loader.state_dict())
    next(iter(loader))
    with pytest.raises(ConfigError, match="within epoch 2: dataset or tokenizer "):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="within epoch 2: batch_size changed"):
        BatchLoader(dataset, batch_size=3, seed=3).load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="within epoch 2: shuffle changed"):
        BatchLoader(dataset, 2, shuffle=False, seed=3).load_state_dict(loader.state_dict())


def test_a_batch_size_below_one_is_refused(dataset):
    with pytest.raises(ConfigError, match="batch_size=0"):
        BatchLoader(dataset, batch_size=0)


def shares(count):
    return [DataShare(rank, count) for rank in range(count)]


@pytest.mark.parametrize(("count", "batch_size"), [(2, 3), (3, 2), (6, 1)])
def test_batches_of_several_processes_are_parts_of_those_of_one(dataset, count, batch_size):
    one = BatchLoader(dataset, count * batch_size, seed=3)
    loaders = [BatchLoader(dataset, batch_size, seed=3, share=share) for share in shares(count)]
    assert {len(each) for each in loaders} == {len(one)} == {2}
    for batch, *parts in zip(one, *loaders, strict=True):
        rows = [rows_of([part], dataset.pad_id) for part in parts]
        whole = rows_of([batch], dataset.pad_id)
        for rank, own in enumerate(rows):
            assert [row for row in own if row] == whole[rank::count]
        assert {str(each.state_dict()) for each in loaders} == {str(one.state_dict())}
        assert sum(part.num_tokens for part in parts) == batch.num_tokens


def test_a_process_without_a_row_gets_one_that_teaches_nothing(dataset):
    loader = BatchLoader(dataset, 2, shuffle=False, share=DataShare(4, 5))
    # Of 11 rows the second batch of all has one, which the first process gets.
    *_, last = loader
    assert (last.tokens.tolist(), last.labels.tolist()) == ([[dataset.pad_id]], [[-100]])
    assert last.num_tokens == 0
    packed = collate([], 7, packed=True)
    assert (packed.input_pos.tolist(), packed.document_ids.tolist()) == ([[0]], [[-1]])


def test_a_place_is_one_for_all_numbers_of_processes_with_as_many_rows_together(dataset):
    two = BatchLoader(dataset, 3, seed=5, share=DataShare(1, 2))
    next(iter(two))
    one = BatchLoader(dataset, 6, seed=5)
    one.load_state_dict(two.state_dict())
    (rest,) = one
    assert len(rest.tokens) == 5
    other = BatchLoader(dataset, 3, seed=5, share=DataShare(0, 3))
    with pytest.raises(ConfigError, match="batch_size, of all processes together changed"):
        other.load_state_dict(two.state_dict())
