"""Prompts to be answered by the model itself: the data of reinforcement learning."""

import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.training.data import DEMO_FILE
from checkpointing.training.rows import DatasetError, read_rows, to_messages
from checkpointing.training.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the assistant answers.

    Attributes:
        tokens: ids.
        text: what they say.
        row: the dataset's row, from which a reward may take the right answer.
    """

    tokens: tuple[int, ...]
    text: str
    row: Mapping[str, Any]


class PromptDataset:
    """Prompts, tokenised when the dataset is made, so that bad data is found at once.

    Args:
        tokenizer: writes conversations as tokens.
        source: one or several of: a ``.jsonl`` file, a ``.json`` file, or a directory or name that
            the library ``datasets`` loads. A row is ``{"prompt": text, …}``, or one of those that
            :class:`~checkpointing.training.InstructDataset` takes, whose last answer is left out.
        max_prompt_tokens: longer prompts are left out; ``None``: none is.
        split: of what ``datasets`` loads.

    Raises:
        DatasetError: if a row is bad (with its place), or no prompt is left.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        source: str | Path | Sequence[str | Path],
        max_prompt_tokens: int | None = None,
        split: str = "train",
    ) -> None:
        sources = [source] if isinstance(source, str | Path) else list(source)
        self._prompts: list[Prompt] = []
        dropped = 0
        for each in sources:
            for where, row in read_rows(str(each), split):
                prompt = _to_prompt(tokenizer, row, where)
                if max_prompt_tokens is not None and len(prompt.tokens) > max_prompt_tokens:
                    dropped += 1
                else:
                    self._prompts.append(prompt)
        if dropped:
            warnings.warn(
                f"{dropped} of {dropped + len(self._prompts)} prompts are left out: they have "
                f"more than {max_prompt_tokens} tokens (dataset.max_prompt_tokens)",
                stacklevel=2,
            )
        if not self._prompts:
            raise DatasetError(f"{', '.join(map(str, sources))}: no prompt is left")

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def fingerprint(self) -> int:
        """CRC-32 of all tokens and rows: equal for equal data in equal order."""
        checksum = 0
        for prompt in self._prompts:
            content = json.dumps([prompt.tokens, prompt.row], sort_keys=True, default=str)
            checksum = zlib.crc32(content.encode(), checksum)
        return checksum


def demo_prompts(tokenizer: ChatTokenizer, max_prompt_tokens: int | None = None) -> PromptDataset:
    """The questions of the demo data; arguments as for the class."""
    return PromptDataset(tokenizer, DEMO_FILE, max_prompt_tokens)


def check_lengths(prompts: PromptDataset, max_new_tokens: int, context: int) -> None:
    """Makes sure that each prompt leaves room for its completion.

    Args:
        prompts: the data.
        max_new_tokens: the most tokens that a completion may have.
        context: of the model, in tokens.

    Raises:
        ConfigError: if a prompt with its completion may be longer than the context.
    """
    longest = max(len(prompts[index].tokens) for index in range(len(prompts)))
    if longest + max_new_tokens > context:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, and with sampling.max_new_tokens="
            f"{max_new_tokens} it may become longer than the model's context of {context}; set "
            f"dataset.max_prompt_tokens to at most {max(context - max_new_tokens, 0)}"
        )


def _to_prompt(tokenizer: ChatTokenizer, row: Any, where: str) -> Prompt:
    if isinstance(row, Mapping) and "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise DatasetError(f"{where}: `prompt` must be a text")
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        messages = to_messages(row, where)
        while messages[-1]["role"] == "assistant":
            messages.pop()
    try:
        tokens = tokenizer.encode_prompt(messages)
    except ConfigError as error:
        raise DatasetError(f"{where}: {error}") from error
    return Prompt(tuple(tokens), tokenizer.decode(tokens), row)
