"""Conversations to token ids, with labels on what the assistant says."""

from pathlib import Path

from tokenizers import Tokenizer, processors

from checkpointing.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from checkpointing.storage.mirror import local
from checkpointing.training.chat_template import Messages, read_chat_template, read_special_tokens

IGNORED = -100
"""Label of a token that the loss does not count."""


class ChatTokenizer:
    """A Hugging Face directory's ``tokenizer.json`` and chat template.

    Args:
        path: the directory, or its URL.
        max_seq_len: longer conversations are cut to this many tokens; ``None``: never.

    Raises:
        CheckpointNotFoundError: if there is no ``tokenizer.json``.
        ConfigError: if there is no chat template, or ``max_seq_len`` is not possible.
        CorruptCheckpointError: if a file cannot be read.
    """

    def __init__(self, path: str | Path, max_seq_len: int | None = None) -> None:
        directory = local(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointNotFoundError(
                f"{file} does not exist; set tokenizer.path to a Hugging Face directory that holds "
                "the model's tokenizer.json"
            )
        if max_seq_len is not None and max_seq_len < 2:
            raise ConfigError(f"tokenizer.max_seq_len={max_seq_len}: must be at least 2")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CorruptCheckpointError(f"{file}: not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # The chat template writes all special tokens; what is left for a post-processor would be
        # to trim white space from the offsets, which are compared with positions in the text here.
        self._tokenizer.post_processor = processors.Sequence([])
        self.template = read_chat_template(directory)
        self.max_seq_len = max_seq_len
        special = read_special_tokens(directory)
        pad = special.get("pad_token", special.get("eos_token", ""))
        self.pad_id: int = self._tokenizer.token_to_id(pad) or 0
        self.end_id: int | None = self._tokenizer.token_to_id(special.get("eos_token", ""))

    def encode_chat(self, messages: Messages) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and their labels.

        The label of a token is its id where the assistant says it (content and end of turn), and
        :data:`IGNORED` elsewhere. A token that begins before the assistant's turn is not labelled.

        Args:
            messages: each with ``role`` and ``content``.

        Raises:
            ConfigError: if the template refuses the messages, or writes the beginning of a
                conversation otherwise when more follows, so that the turns cannot be told apart.
        """
        text = self.template.render(messages)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        spans = [
            self._answer_span(messages, turn, text)
            for turn, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        tokens: list[int] = encoding.ids
        labels = [
            token if any(start <= begin < end for start, end in spans) else IGNORED
            for token, (begin, _) in zip(tokens, encoding.offsets, strict=True)
        ]
        return tokens[: self.max_seq_len], labels[: self.max_seq_len]

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Token ids of a conversation up to where the assistant answers; never cut.

        Args:
            messages: each with ``role`` and ``content``; the last one is no answer.

        Raises:
            ConfigError: if the template refuses the messages.
        """
        text = self.template.render(messages, add_generation_prompt=True)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _answer_span(self, messages: Messages, turn: int, text: str) -> tuple[int, int]:
        before = self.template.render(messages[:turn], add_generation_prompt=True)
        after = self.template.render(messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ConfigError(
                "the chat template writes the beginning of a conversation otherwise when more "
                f"follows, so that the assistant's turn (message {turn}) cannot be found in the "
                "text; use data with one answer per conversation, or edit chat_template.jinja"
            )
        return len(before), len(after)
