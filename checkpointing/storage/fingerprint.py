"""Telling two models of the same shape apart without reading all of them."""

from math import ceil, prod

from torch import Tensor

from checkpointing.mapping.tensors import TensorSource
from checkpointing.storage.tensor_bytes import tensor_bytes

_TENSORS = 32
_ELEMENTS = 1024


def fingerprint(source: TensorSource) -> str:
    """A hash of names, shapes, dtypes, and the first elements of evenly spaced tensors.

    Of the native tensors it is the same in whichever format a model lies on disk.
    """
    # Imported here: only adapter runs need it, and `import checkpointing` stays light.
    import xxhash

    digest = xxhash.xxh3_64()
    for name in sorted(source.metas):
        digest.update(f"{name} {source.metas[name]}\n".encode())
    names = sorted(source.metas)
    for name in names[:: max(1, len(names) // _TENSORS)]:
        digest.update(tensor_bytes(_first_elements(source, name)))
    return digest.hexdigest()


def _first_elements(source: TensorSource, name: str) -> Tensor:
    rows, width = source.rows(name), prod(source.metas[name].shape[1:])
    wanted = ceil(_ELEMENTS / max(width, 1))
    return rows.read(0, min(ceil(wanted / rows.unit) * rows.unit, rows.count)).flatten()[:_ELEMENTS]
