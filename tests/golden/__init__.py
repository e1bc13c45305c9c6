"""Tensor names and shapes of public models, as their publishers' indexes list them.

Each file holds ``config.json`` and the list of one model. ``{0..31}`` in a name stands for the
numbers from 0 to 31; names that share the first such range follow each other layer by layer. What
shows that a list is the published one:

- ``index``: length of the published index in characters, which every name is part of, written with
  this metadata and indentation and file names as long as ``shard``;
- ``files``: sizes of the published files in bytes, which their headers of names, shapes and offsets
  are part of;
- ``total_size``: bytes of all tensors together.

``source`` says where the copy of the index was found, or what else is known of the model.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch

from checkpointing.mapping.tensors import TensorMeta

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(frozen=True)
class GoldenModel:
    """One file of this folder.

    Attributes:
        name: the file's name.
        content: what it holds.
    """

    name: str
    content: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """``config.json``."""
        return self.content["config"]

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    @property
    def total_size(self) -> int:
        return self.content["total_size"]

    @cached_property
    def metas(self) -> dict[str, TensorMeta]:
        """Shape and dtype of every tensor, in the order of the model."""
        dtypes = {
            name: dtype
            for pattern, dtype in self.content.get("dtypes", {}).items()
            for name in _expand(pattern)
        }
        shapes = self.content["tensors"]
        return {
            name: TensorMeta(
                tuple(shapes[pattern]), getattr(torch, dtypes.get(name, self.content["dtype"]))
            )
            for pattern, name in _in_order(shapes)
        }


def golden_models() -> dict[str, GoldenModel]:
    """All of them, by name."""
    return {
        path.stem: GoldenModel(path.stem, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(Path(__file__).parent.glob("*.json"))
    }


def _in_order(patterns: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every pattern with each of its names, layer by layer."""
    for _, group in groupby(patterns, key=_first_range):
        entries = [(pattern, name) for pattern in group for name in _expand(pattern)]
        yield from sorted(entries, key=lambda entry: _layer(entry[1]))


def _first_range(pattern: str) -> str:
    found = _RANGE.search(pattern)
    return pattern if found is None else pattern[: found.end()]


def _layer(name: str) -> int:
    found = re.search(r"\d+", name)
    return -1 if found is None else int(found[0])


def _expand(pattern: str) -> Iterator[str]:
    texts = _RANGE.split(pattern)
    ranges = [
        range(int(first), int(last) + 1)
        for first, last in zip(texts[1::3], texts[2::3], strict=True)
    ]
    for numbers in product(*ranges):
        name = texts[0]
        for number, text in zip(numbers, texts[3::3], strict=True):
            name += f"{number}{text}"
        yield name
