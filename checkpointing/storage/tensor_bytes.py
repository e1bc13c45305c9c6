"""Tensors as the bytes that files hold of them."""

import ctypes
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from checkpointing.mapping.tensors import is_dtensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in row-major order; a copy only where they are not that."""
    tensor = tensor.detach().cpu().contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    buffer = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    buffer._owner = tensor  # type: ignore[attr-defined]  # the address is the tensor's
    return memoryview(buffer).cast("B")


def named_tensors(content: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors in nested dictionaries and lists, and those in shards, by their paths."""
    if type(content) in (Tensor, torch.nn.Parameter) or is_dtensor(content):
        yield prefix, content  # type: ignore[misc]
    elif isinstance(content, Mapping | list | tuple):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from named_tensors(value, f"{prefix}.{key}" if prefix else str(key))
