"""Modules that are trained whole beside an adapter, as PEFT's ``modules_to_save`` are."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from checkpointing.training.adapter_switch import Switched


class _InDtypeOfBase(Switched, nn.Module):
    """Gives the model a trained copy in the dtype that it computes in, and keeps the base's tensor.

    Args:
        base: the tensor that the copy stands for, which is not changed.
    """

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        # A parameter, so that it is cut like the others where a model is on many ranks.
        self.base = nn.Parameter(base, requires_grad=False)

    def forward(self, trained: Tensor) -> Tensor:
        # `to` with a dtype also dequantises an NF4 weight.
        return (trained if self.adapter_is_on else self.base).to(self.base.dtype)


def train_whole(module: nn.Module) -> None:
    """Trains the module's own parameters: copies of them in fp32, as the adapter is.

    The module computes with the copies. The tensors that they start from may share memory with a
    checkpoint; they are kept as they are.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        base = parameter.detach()
        # `to` with a dtype also dequantises an NF4 weight.
        copy = base.to(torch.float32).clone()
        setattr(module, name, nn.Parameter(copy))
        # Unsafe means that the dtype may change, as it does on purpose.
        parametrize.register_parametrization(module, name, _InDtypeOfBase(base), unsafe=True)


def trained_copies(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The trained copies, by the names that the base's tensors have.

    Args:
        modules: all of a model, by full name.
    """
    for name, parametrization in _parametrizations(modules):
        yield name, parametrization.original


def tensors_of_base(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model but the trained copies, and the base's where there is a copy."""
    own = {n: t for n, t in model.state_dict().items() if ".parametrizations." not in n}
    copied = _parametrizations(dict(model.named_modules()))
    return own | {name: _base(each) for name, each in copied}


def start_copies(model: nn.Module) -> None:
    """Gives the trained copies the values of the base's tensors, which were loaded meanwhile."""
    with torch.no_grad():
        for _, parametrization in _parametrizations(dict(model.named_modules())):
            parametrization.original.copy_(_base(parametrization))


def _base(parametrization: parametrize.ParametrizationList) -> Tensor:
    ours = parametrization[0]
    assert isinstance(ours, _InDtypeOfBase)  # as train_whole has registered
    return ours.base.detach()


def _parametrizations(
    modules: Mapping[str, nn.Module],
) -> Iterator[tuple[str, parametrize.ParametrizationList]]:
    # By the name, since asking every module whether it has some takes ten times as long.
    for name, module in modules.items():
        if name.endswith(".parametrizations"):
            for own, each in module.named_children():
                if isinstance(each, parametrize.ParametrizationList):
                    yield f"{name.removesuffix('.parametrizations')}.{own}", each
