"""Computing with the base of a model, its adapter switched off."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class Switched:
    """A module that computes with an adapter, unless it is switched off.

    Attributes:
        adapter_is_on: whether it does.
    """

    adapter_is_on: bool = True


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model computes as its base does while the block runs; no weight is changed or copied.

    So it is its own reference, such as that of a KL penalty. Modules that are trained whole, beside
    an adapter, compute with the base's weights too.
    """
    switched = [m for m in model.modules() if isinstance(m, Switched) and m.adapter_is_on]
    for module in switched:
        module.adapter_is_on = False
    try:
        yield
    finally:
        for module in switched:
            module.adapter_is_on = True
