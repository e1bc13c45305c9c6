"""Instruction data: rows of a JSON file or of a dataset, as checked conversations."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import CheckpointingError, CheckpointNotFoundError, ConfigError
from checkpointing.storage.mirror import local

ROLES = ("system", "user", "assistant")


class DatasetError(CheckpointingError, ValueError):
    """Training data is not in a form that can be used."""


def read_rows(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """Rows of one source, each with the place to name in an error.

    Args:
        source: a ``.jsonl`` file (an object per line), a ``.json`` file (a list of objects), the
            URL of one, or what the library ``datasets`` loads: a directory or a name on the Hugging
            Face Hub.
        split: of a dataset that ``datasets`` loads.

    Raises:
        DatasetError: if a line is not JSON, with its number.
        CheckpointNotFoundError: if a file does not exist.
        ConfigError: if the library ``datasets`` is needed and not installed.
    """
    if Path(source).suffix not in (".jsonl", ".json"):
        yield from _read_dataset(source, split)
        return
    path = local(source)
    if not path.is_file():
        raise CheckpointNotFoundError(f"{path} does not exist; set dataset.source to a file")
    elif path.suffix == ".jsonl":
        yield from _read_json_lines(path)
    else:
        yield from _read_json_list(path)


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{where}: not valid JSON: {error}") from error


def _read_json_list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DatasetError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise DatasetError(f"{path}: not a list of rows; a .jsonl file has one row per line")
    for index, row in enumerate(rows):
        yield f"{path}, row {index}", row


def _read_dataset(source: str, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"dataset.source={source!r} is not a .jsonl or .json file, so that the library "
            "`datasets` must load it; install it with `pip install datasets`"
        ) from error
    saved = Path(source)
    if (saved / "state.json").is_file():
        loaded = datasets.load_from_disk(source)
    elif (saved / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(source)[split]
    else:
        loaded = datasets.load_dataset(source, split=split)
    for index, row in enumerate(loaded):
        yield f"{source}, split {split}, row {index}", row


def to_messages(row: Any, where: str) -> list[dict[str, str]]:
    """The conversation that a row holds.

    Args:
        row: ``{"messages": [{"role", "content"}, …]}`` or ``{"instruction", "input"?, "output"}``.
        where: named in errors.

    Raises:
        DatasetError: if the row has neither form, or no answer to learn from.
    """
    if not isinstance(row, Mapping):
        raise DatasetError(f"{where}: not an object but {type(row).__name__}")
    if "messages" in row:
        return _check_messages(row["messages"], where)
    if "instruction" in row and "output" in row:
        parts = [row["instruction"], row.get("input") or "", row["output"]]
        if not all(isinstance(part, str) for part in parts):
            raise DatasetError(f"{where}: instruction, input and output must be texts")
        instruction, extra, output = parts
        prompt = f"{instruction}\n\n{extra}" if extra else instruction
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    raise DatasetError(
        f"{where}: has the keys {sorted(row)}; give `messages`, or `instruction` and `output`"
    )


def _check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f"{where}: `messages` must be a list of at least one message")
    checked = []
    for index, message in enumerate(messages):
        place = f"{where}, message {index}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise DatasetError(f"{place}: must be an object with `role` and `content`")
        if message["role"] not in ROLES:
            raise DatasetError(f"{place}: role {message['role']!r} is none of {list(ROLES)}")
        if not isinstance(message["content"], str):
            raise DatasetError(f"{place}: `content` must be a text")
        checked.append({"role": message["role"], "content": message["content"]})
    roles = [message["role"] for message in checked]
    if "assistant" not in roles:
        raise DatasetError(f"{where}: no message with role `assistant` to learn from")
    if roles[0] == "assistant":
        raise DatasetError(f"{where}: the first message must be of the user or the system")
    return checked
