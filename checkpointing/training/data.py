"""Instruction datasets: conversations as rows of tokens and labels, packed or not."""

import warnings
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import ConfigError
from checkpointing.training.rows import DatasetError, read_rows, to_messages
from checkpointing.training.tokenizer import IGNORED, ChatTokenizer

DEMO_FILE = Path(__file__).with_name("demo_instruct.jsonl")


@dataclass(frozen=True)
class TokenRow:
    """One row of training data: a conversation, or several packed one after the other.

    Attributes:
        tokens: 32-bit ids.
        labels: for each token its id where it is to be learnt, else :data:`IGNORED`; the first
            token of a conversation is never to be learnt.
        lengths: of the conversations in the row, in tokens.
    """

    tokens: array
    labels: array
    lengths: tuple[int, ...]


class InstructDataset:
    """Conversations, tokenised when the dataset is made, so that bad data is found at once.

    Args:
        tokenizer: writes conversations as tokens.
        source: one or several of: a ``.jsonl`` file, a ``.json`` file, or a directory or name that
            the library ``datasets`` loads. A row is ``{"messages": [{"role", "content"}, …]}`` or
            ``{"instruction", "input"?, "output"}``.
        packed: fill rows up to the longest length with several conversations, each of which sees
            only itself.
        max_seq_len: longest row in tokens; ``None``: the tokenizer's.
        split: of what ``datasets`` loads.

    Raises:
        DatasetError: if a row is bad (with its place), or nothing is left to learn from.
        ConfigError: if ``packed`` is asked for without a longest length.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        source: str | Path | Sequence[str | Path],
        packed: bool = False,
        max_seq_len: int | None = None,
        split: str = "train",
    ) -> None:
        sources = [source] if isinstance(source, str | Path) else list(source)
        limit = max_seq_len if max_seq_len is not None else tokenizer.max_seq_len
        if packed and limit is None:
            raise ConfigError("dataset.packed needs a longest length: set tokenizer.max_seq_len")
        self.pad_id = tokenizer.pad_id
        self.packed = packed
        rows = []
        dropped = 0
        for each in sources:
            for where, row in read_rows(str(each), split):
                encoded = _encode(tokenizer, to_messages(row, where), where, limit)
                if encoded is None:
                    dropped += 1
                else:
                    rows.append(encoded)
        if not rows:
            raise DatasetError(
                f"{', '.join(map(str, sources))}: nothing to learn from; {dropped} conversations "
                f"have no answer within the first {limit} tokens"
            )
        if dropped:
            warnings.warn(
                f"{dropped} of {dropped + len(rows)} conversations are left out: they have no "
                f"answer within the first {limit} tokens (tokenizer.max_seq_len)",
                stacklevel=2,
            )
        self._rows = list(_pack(rows, limit)) if packed and limit is not None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TokenRow:
        return self._rows[index]

    def fingerprint(self) -> int:
        """CRC-32 of all tokens and labels: equal for equal data in equal order."""
        checksum = 0
        for row in self._rows:
            checksum = zlib.crc32(row.labels, zlib.crc32(row.tokens, checksum))
        return checksum


def demo_dataset(
    tokenizer: ChatTokenizer, packed: bool = False, max_seq_len: int | None = None
) -> InstructDataset:
    """The small instruction set that ships with the package; arguments as for the class."""
    return InstructDataset(tokenizer, DEMO_FILE, packed=packed, max_seq_len=max_seq_len)


def _encode(
    tokenizer: ChatTokenizer, messages: list[dict[str, str]], where: str, limit: int | None
) -> TokenRow | None:
    """The conversation as a row; ``None`` if it has no label."""
    try:
        tokens, labels = tokenizer.encode_chat(messages)
    except ConfigError as error:
        raise DatasetError(f"{where}: {error}") from error
    tokens, labels = tokens[:limit], labels[:limit]
    labels[:1] = [IGNORED]
    if all(label == IGNORED for label in labels):
        return None
    return TokenRow(array("i", tokens), array("i", labels), (len(tokens),))


def _pack(rows: list[TokenRow], limit: int) -> Iterator[TokenRow]:
    """Joins rows in their order, as many as fit into ``limit`` tokens."""
    group: list[TokenRow] = []
    for row in rows:
        if group and sum(len(each.tokens) for each in group) + len(row.tokens) > limit:
            yield _join(group)
            group = []
        group.append(row)
    yield _join(group)


def _join(group: list[TokenRow]) -> TokenRow:
    tokens, labels = array("i"), array("i")
    for row in group:
        tokens.extend(row.tokens)
        labels.extend(row.labels)
    return TokenRow(tokens, labels, tuple(len(row.tokens) for row in group))
