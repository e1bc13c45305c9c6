"""Steps of the optimizer within the backward pass, so that no two gradients need memory at once."""

from torch import Tensor
from torch.optim import Optimizer


def step_in_backward(optimizer: Optimizer) -> None:
    """Makes a backward pass step each parameter as soon as its gradient is there, and free it.

    The optimizer stays one: its settings, its schedule and its state are as without.

    Args:
        optimizer: whose own ``step`` is not to be called any more.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(_Step(optimizer, number))


class _Step:
    """Steps one parameter: the others are hidden from the optimizer for that time."""

    def __init__(self, optimizer: Optimizer, group: int) -> None:
        self._optimizer = optimizer
        # By number: the groups are made anew when a state is loaded.
        self._group = group

    def __call__(self, parameter: Tensor) -> None:
        groups = self._optimizer.param_groups
        hidden = [group["params"] for group in groups]
        try:
            for number, group in enumerate(groups):
                group["params"] = [parameter] if number == self._group else []
            self._optimizer.step()
        finally:
            for group, parameters in zip(groups, hidden, strict=True):
                group["params"] = parameters
        parameter.grad = None
