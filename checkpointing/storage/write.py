"""Writing tensors, one at a time where the file format allows it."""

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.tensors import TensorMeta, TensorSource, meta_of
from checkpointing.storage.digest import DigestingFile, checksum_of
from checkpointing.storage.read import SAFETENSORS_DTYPES

Progress = Callable[[int], object]
"""Called with the number of bytes that were just written."""


def parse_size(size: str | int) -> int:
    """Bytes in ``"5GB"`` (10**9), ``"200MiB"`` (2**20) or a plain number.

    Raises:
        ConfigError: if it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    if match is not None:
        base = 1024 if match[3] else 1000
        nbytes = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
        if nbytes > 0:
            return nbytes
    raise ConfigError(f"max_shard_size: {size!r} is no size; write for example 5GB or 500MB")


def plan_shards(metas: Mapping[str, TensorMeta], max_bytes: int | None) -> list[list[str]]:
    """Names of the tensors of each file, in order; a larger tensor gets a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, meta in metas.items():
        if shards[-1] and max_bytes is not None and filled + meta.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += meta.nbytes
    return shards


def write_safetensors(
    file: DigestingFile, source: TensorSource, names: Sequence[str], progress: Progress
) -> None:
    """Writes the content of a ``.safetensors`` file, holding one tensor in memory at a time.

    Layout: 8 bytes little-endian length of the header, the JSON header padded with spaces to a
    multiple of 8, the tensors' data (https://github.com/huggingface/safetensors#format).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        meta = source.metas[name]
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [offset, offset + meta.nbytes],
        }
        offset += meta.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for name in names:
        tensor = source.read(name)
        if meta_of(tensor) != source.metas[name]:
            raise TensorMismatchError(
                "writing tensors",
                [f"{name}: is {meta_of(tensor)}, and was announced as {source.metas[name]}"],
                "This is a fault of the program, not of your files; please report it.",
            )
        file.write_tensor(name, tensor_bytes(tensor))
        progress(source.metas[name].nbytes)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in row-major order; a copy only where they are not that."""
    tensor = tensor.detach().cpu().contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    buffer = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    buffer._owner = tensor  # type: ignore[attr-defined]  # the address is the tensor's
    return memoryview(buffer).cast("B")


def write_torch_file(
    file: DigestingFile, source: TensorSource, names: Sequence[str], progress: Progress
) -> None:
    """Writes a state dict with ``torch.save``."""
    state_dict = {}
    for name in names:
        state_dict[name] = _own_storage(source.read(name).detach().cpu())
    write_torch_object(file, state_dict)
    for name in names:
        progress(source.metas[name].nbytes)


def write_torch_object(file: DigestingFile, content: object) -> None:
    """Writes plain data and tensors with ``torch.save``."""
    torch.save(content, file)  # type: ignore[arg-type]  # it has what torch.save uses
    for name, tensor in named_tensors(content):
        file.tensors[name] = checksum_of(tensor_bytes(tensor))


def named_tensors(content: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The plain tensors in nested dictionaries and lists, by the path to them."""
    if type(content) in (Tensor, torch.nn.Parameter):
        yield prefix, content  # type: ignore[misc]
    elif isinstance(content, Mapping | list | tuple):
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from named_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _own_storage(tensor: Tensor) -> Tensor:
    # torch.save writes the whole storage, which a slice shares with its neighbours.
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole and tensor.is_contiguous() else tensor.contiguous().clone()
