"""How much of a base is no longer what it was."""

from collections.abc import Mapping

from torch import Tensor


def changed_share(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Share of the elements that differ; both have the same names and shapes."""
    changed = sum(int((after[name] != tensor).sum()) for name, tensor in before.items())
    return changed / sum(tensor.numel() for tensor in before.values())
