import json
from itertools import chain

import datasets
import pytest

from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.training import ChatTokenizer, DatasetError, InstructDataset, demo_dataset
from tests.training.tiny_tokenizer import CONVERSATION

ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Greet.", "output": "Hello"},
]
AS_MESSAGES = [
    [{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}],
    [{"role": "user", "content": "Greet."}, {"role": "assistant", "content": "Hello"}],
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def token_lists(dataset):
    return [
        (list(row.tokens), list(row.labels))
        for row in map(dataset.__getitem__, range(len(dataset)))
    ]


def test_rows_are_conversations_or_instructions(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": CONVERSATION}, *ALPACA])
    assert token_lists(InstructDataset(tokenizer, str(path))) == [
        tokenizer.encode_chat(messages) for messages in [CONVERSATION, *AS_MESSAGES]
    ]


def test_sources_may_be_several_files_and_a_json_list(tmp_path, tokenizer):
    first = write_lines(tmp_path / "first.jsonl", ALPACA[:1])
    second = tmp_path / "second.json"
    second.write_text(json.dumps(ALPACA[1:]))
    assert token_lists(InstructDataset(tokenizer, [first, second])) == [
        tokenizer.encode_chat(messages) for messages in AS_MESSAGES
    ]


@pytest.mark.parametrize("with_splits", [False, True])
def test_a_directory_of_the_datasets_library_is_a_source(tmp_path, tokenizer, with_splits):
    saved = datasets.Dataset.from_list([{**row, "input": row.get("input")} for row in ALPACA])
    splits = datasets.DatasetDict({"test": saved.select([1]), "train": saved})
    (splits if with_splits else saved).save_to_disk(str(tmp_path / "saved"))
    dataset = InstructDataset(tokenizer, str(tmp_path / "saved"))
    assert token_lists(dataset) == [tokenizer.encode_chat(messages) for messages in AS_MESSAGES]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not valid JSON"),
        ("[1]", "line 3: not an object but list"),
        ('{"prompt": "x"}', r"line 3: has the keys \['prompt'\]; give `messages`"),
        ('{"instruction": "x", "output": 3}', "line 3: instruction, input and output must be"),
        ('{"messages": []}', "line 3: `messages` must be a list"),
        ('{"messages": [{"role": "user"}]}', "line 3, message 0: must be an object with"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "line 3, message 0: role 'bot'"),
        ('{"messages": [{"role": "user", "content": 1}]}', "line 3, message 0: `content`"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 3: no message with role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 3: the first message"),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer, line, message):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": CONVERSATION}])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(DatasetError, match=message):
        InstructDataset(tokenizer, path)


def test_a_source_that_is_not_there_is_a_clear_error(tmp_path, tokenizer):
    with pytest.raises(CheckpointNotFoundError, match=r"none\.jsonl does not exist"):
        InstructDataset(tokenizer, tmp_path / "none.jsonl")


def test_packing_joins_what_fits_and_loses_nothing(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", [*ALPACA, {"messages": CONVERSATION}, *ALPACA])
    plain = token_lists(InstructDataset(tokenizer, path))
    sizes = [len(tokens) for tokens, _ in plain]
    limit = max(sizes[0] + sizes[1], sizes[2])
    packed = InstructDataset(tokenizer, path, packed=True, max_seq_len=limit)
    assert [packed[i].lengths for i in range(len(packed))] == [
        (sizes[0], sizes[1]),
        (sizes[2],),
        (sizes[3], sizes[4]),
    ]
    joined = token_lists(packed)
    for part in (0, 1):
        assert list(chain(*(row[part] for row in joined))) == list(
            chain(*(row[part] for row in plain))
        )


def test_packing_needs_a_length(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", ALPACA)
    with pytest.raises(ConfigError, match=r"set tokenizer\.max_seq_len"):
        InstructDataset(tokenizer, path, packed=True)


def test_a_conversation_whose_answer_is_cut_off_is_left_out_with_a_warning(tmp_path, tokenizer_dir):
    late = [
        {"role": "user", "content": "word " * 60},
        {"role": "assistant", "content": "Yes"},
    ]
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": late}, ALPACA[1]])
    short = ChatTokenizer(tokenizer_dir, max_seq_len=60)
    with pytest.warns(UserWarning, match="1 of 2 conversations are left out"):
        dataset = InstructDataset(short, path)
    assert token_lists(dataset) == [short.encode_chat(AS_MESSAGES[1])]
    only = write_lines(tmp_path / "only.jsonl", [{"messages": late}])
    with pytest.raises(DatasetError, match="nothing to learn from"):
        InstructDataset(short, only)


def test_the_fingerprint_tells_other_data(tmp_path, tokenizer):
    one = InstructDataset(tokenizer, write_lines(tmp_path / "one.jsonl", ALPACA))
    same = InstructDataset(tokenizer, write_lines(tmp_path / "same.jsonl", ALPACA))
    other = InstructDataset(tokenizer, write_lines(tmp_path / "other.jsonl", ALPACA[::-1]))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


def test_the_shipped_data_is_whole(tokenizer):
    dataset = demo_dataset(tokenizer)
    assert len(dataset) >= 100
    assert all(max(row.labels) >= 0 for row in map(dataset.__getitem__, range(len(dataset))))
