import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpointing.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from checkpointing.storage.cache import cache_dir
from checkpointing.training import ChatTokenizer
from tests.training.tiny_tokenizer import CONVERSATION, TEMPLATE, write_tokenizer

SMOLLM2 = cache_dir() / "SmolLM2-135M-Instruct"
MARKED = TEMPLATE.replace(
    "{{ message['content'] }}<|end|>\n",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>\n"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|end|>\n{% endif %}",
)


def peer(directory):
    return PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        chat_template=(directory / "chat_template.jinja").read_text(),
        bos_token="<|start|>",
        eos_token="<|end|>",
    )


def labelled_texts(tokenizer, tokens, labels):
    """Texts of the runs of labelled tokens."""
    texts, run = [], []
    for token, label in [*zip(tokens, labels, strict=True), (0, -100)]:
        if label != -100:
            assert label == token
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


def test_token_ids_are_those_of_transformers(tokenizer, tokenizer_dir):
    expected = peer(tokenizer_dir).apply_chat_template(CONVERSATION)["input_ids"]
    assert tokenizer.encode_chat(CONVERSATION)[0] == expected


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs the model of `tune download demo`")
def test_token_ids_of_a_real_model_are_those_of_transformers():
    tokenizer = ChatTokenizer(SMOLLM2)
    tokens, labels = tokenizer.encode_chat(CONVERSATION)
    expected = AutoTokenizer.from_pretrained(SMOLLM2).apply_chat_template(CONVERSATION)
    assert tokens == expected["input_ids"]
    # One token is the line end before the answer and the answer's first one.
    assert labelled_texts(tokenizer, tokens, labels) == [
        "\nRed and blue: \u00fc \u2713.<|im_end|>\n",
        "Welcome  <|im_end|>\n",
    ]


def test_only_what_the_assistant_says_is_labelled(tokenizer):
    tokens, labels = tokenizer.encode_chat(CONVERSATION)
    assert labelled_texts(tokenizer, tokens, labels) == [
        "\n\nRed and blue: \u00fc \u2713.<|end|>\n",
        "Welcome  <|end|>\n",
    ]


def test_labels_are_those_of_a_template_that_marks_them_for_transformers(tmp_path):
    directory = write_tokenizer(tmp_path, MARKED)
    expected = peer(directory).apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, labels = ChatTokenizer(directory).encode_chat(CONVERSATION)
    assert tokens == expected["input_ids"]
    assert [label != -100 for label in labels] == [bool(m) for m in expected["assistant_masks"]]


def test_a_long_conversation_is_cut(tokenizer_dir, tokenizer):
    tokens, labels = tokenizer.encode_chat(CONVERSATION)
    cut = ChatTokenizer(tokenizer_dir, max_seq_len=41).encode_chat(CONVERSATION)
    assert cut == (tokens[:41], labels[:41])


@pytest.mark.parametrize(
    "stored",
    [TEMPLATE, [{"name": "tool_use", "template": ""}, {"name": "default", "template": TEMPLATE}]],
)
def test_the_template_may_be_in_the_tokenizer_config(tmp_path, tokenizer, stored):
    write_tokenizer(tmp_path, template=None)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": stored}))
    assert ChatTokenizer(tmp_path).encode_chat(CONVERSATION) == tokenizer.encode_chat(CONVERSATION)


def test_a_template_sees_what_transformers_gives_it(tmp_path):
    template = (
        "{%- for message in messages %}\n    {%- if loop.index > 5 %}{% break %}{% endif %}\n"
        "{{ bos_token + message | tojson + eos_token }}{{ unk_token }}{{ strftime_now('%%') }}\n"
        "{%- endfor %}"
    )
    directory = write_tokenizer(tmp_path, template)
    expected = peer(directory).apply_chat_template(CONVERSATION, tokenize=False)
    assert '"content": "Thanks!"' in expected
    assert ChatTokenizer(directory).template.render(CONVERSATION) == expected


def test_a_template_that_rewrites_the_beginning_is_refused(tmp_path):
    directory = write_tokenizer(tmp_path, "{{ messages | length }}" + TEMPLATE)
    with pytest.raises(ConfigError, match=r"message 1.* cannot be found"):
        ChatTokenizer(directory).encode_chat(CONVERSATION)


def test_what_a_template_refuses_is_told(tmp_path):
    directory = write_tokenizer(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match=r"\['user', 'assistant'.*roles must alternate"):
        ChatTokenizer(directory).encode_chat(CONVERSATION)


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    directory = write_tokenizer(tmp_path, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="unsafe"):
        ChatTokenizer(directory).encode_chat(CONVERSATION)


def test_a_directory_without_template_or_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"tokenizer\.json does not exist; set"):
        ChatTokenizer(tmp_path)
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(ConfigError, match=r"no chat template.*Set tokenizer\.path"):
        ChatTokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CorruptCheckpointError, match="not a Jinja template"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="not a tokenizer"):
        ChatTokenizer(tmp_path)
