"""NF4, the 4-bit numbers in which QLoRA (Dettmers et al. 2023) keeps its base, by torchao."""

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.tensors import (
    LazyTensors,
    Rows,
    StateDictSource,
    TensorMeta,
    TensorSource,
)

QUANTIZED_BASE_KEY = "quantized_base"
PEFT_NOTE = (
    "the adapter was trained on the base rounded to NF4, which PEFT's form does not say: load the "
    "base so rounded, or use the merged model (`tune merge`)"
)

# At most so many elements share a scale, and so many scales a scale of theirs, as in the paper.
_BLOCK = 64
_SCALE_BLOCK = 256
# Where torchao has it: 0.18, and 0.13 to 0.17.
_HOMES = ("torchao.quantization", "torchao.dtypes")


@dataclass(frozen=True)
class NF4Rounding:
    """How the base of a run was rounded to NF4.

    The linear weights of the layers are rounded, as QLoRA and torchtune do it; the token embedding,
    the output projection, norms and biases keep their numbers.

    Attributes:
        dtype: of the run. All weights are cast to it, then rounded, and dequantised to it again.
    """

    dtype: torch.dtype

    def to_state(self) -> dict[str, Any]:
        """What a recipe state and a manifest say of it."""
        return {
            "quantization": "nf4",
            "dtype": str(self.dtype).removeprefix("torch."),
            "block_size": _BLOCK,
            "scaler_block_size": _SCALE_BLOCK,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "NF4Rounding":
        """Reads what :meth:`to_state` gave.

        Raises:
            ConfigError: if it is another rounding than is known here.
        """
        dtype = getattr(torch, str(state.get("dtype")), None)
        if isinstance(dtype, torch.dtype) and cls(dtype).to_state() == dict(state):
            return cls(dtype)
        raise ConfigError(
            f"{QUANTIZED_BASE_KEY}: {dict(state)} is no rounding that is known here, only those "
            f"like {cls(torch.bfloat16).to_state()}; a newer version may have saved it"
        )

    def quantized(self, weight: Tensor) -> Tensor:
        """A weight in NF4: torchao's ``NF4Tensor`` of the same shape, of this dtype.

        Raises:
            ConfigError: if torchao is not installed, or has it no more.
        """
        block, scale_block = block_sizes(weight.shape)
        found: Tensor = _to_nf4()(weight.to(self.dtype).contiguous(), block, scale_block)
        return found

    def rounded(self, base: TensorSource) -> LazyTensors:
        """A base with the numbers that a run trains on, of this dtype; one tensor at a time.

        Raises:
            TensorMismatchError: lists the weights that cannot be rounded.
        """
        check_shapes({name: meta.shape for name, meta in base.metas.items()})
        return LazyTensors.of_whole(
            {name: TensorMeta(meta.shape, self.dtype) for name, meta in base.metas.items()},
            {name: partial(self._read, base, name) for name in base.metas},
        )

    def _read(self, base: TensorSource, name: str) -> Tensor:
        tensor = base.read(name)
        if is_quantized(name, tensor.shape):
            tensor = self.quantized(tensor)
        return tensor.to(self.dtype)


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether a native tensor is among those that are rounded: a linear weight of a layer.

    The weights of experts, which have three dimensions, are none that torchao can round, and the
    router's, which are few, decide between experts.
    """
    linear = len(shape) == 2 and re.fullmatch(r"layers\.\d+\..+\.weight", name) is not None
    return linear and not name.endswith(".router.gate.weight")


def dequantized(state_dict: Mapping[str, Tensor]) -> LazyTensors:
    """The plain tensors that a state dict stands for, each of its own dtype, when they are read.

    Those in NF4 can only be read whole.
    """
    source = StateDictSource(state_dict)

    def rows(name: str) -> Rows:
        tensor = state_dict[name]
        if not is_nf4(tensor):
            return source.rows(name)
        # `to` with a dtype dequantises it.
        return Rows.whole(tuple(tensor.shape), lambda: tensor.to(tensor.dtype))

    return LazyTensors(source.metas, {name: partial(rows, name) for name in state_dict})


def is_nf4(tensor: Tensor) -> bool:
    """Whether a tensor is torchao's ``NF4Tensor``, or a parameter of one."""
    # By its name: its class has moved, and importing it takes long.
    return type(tensor).__name__ == "NF4Tensor"


def check_shapes(shapes: Mapping[str, Sequence[int]]) -> None:
    """Checks that the weights of a model can be rounded, before any is.

    Raises:
        TensorMismatchError: lists those that cannot.
    """
    problems = [
        f"{name}: {list(shape)} has an odd number of elements"
        for name, shape in shapes.items()
        if is_quantized(name, shape) and math.prod(shape) % 2
    ]
    if problems:
        raise TensorMismatchError(
            "rounding the base to NF4, which stores two elements in a byte",
            problems,
            "Train this model with model.quantize_base=False.",
        )


def block_sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Elements that share a scale, and scales that share a scale, for a weight.

    Blocks must divide the weight without a rest. The sizes of the paper, 64 and 256, do so for
    most models; else the largest that do are taken, such as 64 and 216 for the 576 by 576 of
    SmolLM2-135M.

    Args:
        shape: of the weight, with an even number of elements.
    """
    elements = math.prod(shape)
    block = max(size for size in range(2, _BLOCK + 1, 2) if elements % size == 0)
    blocks = elements // block
    return block, max(size for size in range(1, _SCALE_BLOCK + 1) if blocks % size == 0)


def _to_nf4() -> Callable[..., Tensor]:
    """torchao's function, wherever the installed release has it."""
    reasons = []
    for home in _HOMES:
        try:
            found: Callable[..., Tensor] = importlib.import_module(home).to_nf4
        except (ImportError, AttributeError) as error:
            reasons.append(f"{home}: {error}")
        else:
            return found
    try:
        has = f"torchao {metadata.version('torchao')} has no to_nf4 ({'; '.join(reasons)})"
    except metadata.PackageNotFoundError:
        has = "torchao is not installed"
    raise ConfigError(f"NF4 needs torchao 0.13 to 0.18, and {has}: pip install torchao==0.18.0")
