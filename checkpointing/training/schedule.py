"""Learning-rate schedules."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from checkpointing.training.components import COMPONENT, instantiate, locate, signature
from checkpointing.training.run_record import plain

_LENGTH = "num_training_steps"


class Schedule:
    """A scheduler of torch, or a constant learning rate, that can be taken up again.

    Args:
        optimizer: whose settings the scheduler changes.
        scheduler: at its first step; ``None`` for none.
        settings: plain values that decide the schedule. If they are those of the run that is
            resumed, its state is taken as it was; else the new schedule goes on where it would be
            by now.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: LRScheduler | None, settings: Mapping[str, Any]
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._settings = dict(settings)

    def step(self, loss: float) -> None:
        """Goes to the next step; the loss is for schedulers that ask for a metric."""
        if self._scheduler is not None:
            # mypy takes all for schedulers without one.
            arguments: tuple[Any, ...] = (loss,) if self._asks_for_metric else ()
            self._scheduler.step(*arguments)

    @property
    def _asks_for_metric(self) -> bool:
        return (
            self._scheduler is not None
            and "metrics" in inspect.signature(self._scheduler.step).parameters
        )

    def state_dict(self) -> dict[str, Any]:
        """The state, with the settings that it belongs to."""
        state = None if self._scheduler is None else self._scheduler.state_dict()
        return {"settings": self._settings, "state": state}

    def take_up(
        self, saved: Mapping[str, Any] | None, groups: Sequence[Mapping[str, Any]], steps: int
    ) -> None:
        """Goes to where a saved run was.

        Args:
            saved: the state; ``None`` if it was not saved.
            groups: the optimizer's groups as they were saved, in which schedules keep values too.
            steps: optimizer steps that were done.
        """
        if saved is not None and saved["settings"] == self._settings:
            if self._scheduler is not None:
                self._scheduler.load_state_dict(dict(saved["state"]))
            for group, values in zip(self._optimizer.param_groups, groups, strict=True):
                _update(group, values)
        elif self._scheduler is not None and self._asks_for_metric:
            print("lr_scheduler: starts anew, since it is another one than before")
        elif self._scheduler is not None:
            with warnings.catch_warnings():
                # It is not the optimizer's first step, whatever the scheduler has seen.
                warnings.filterwarnings(
                    "ignore", "Detected call of `lr_scheduler.step", UserWarning
                )
                for _ in range(getattr(self._scheduler, "last_epoch", 0), steps):
                    self._scheduler.step()


def make_schedule(config: DictConfig, optimizer: Optimizer, total_steps: int) -> Schedule:
    """The schedule that a recipe's config names in ``lr_scheduler``, at its first step.

    Args:
        config: of the recipe.
        optimizer: whose settings the schedule changes.
        total_steps: optimizer steps of the whole run; schedulers that have an argument
            ``num_training_steps`` get them.

    Raises:
        ConfigError: if the scheduler does not exist or the arguments do not fit it.
    """
    node = config.get("lr_scheduler")
    length = {}
    if node is not None:
        sign = signature(locate(node[COMPONENT])) if COMPONENT in node else None
        if sign is not None and _LENGTH in sign.parameters:
            length = {_LENGTH: total_steps}
    scheduler = instantiate(node, optimizer, **length)
    settings = {key: plain(config.get(key)) for key in ("optimizer", "lr_scheduler")}
    return Schedule(optimizer, scheduler, {**settings, **length})


def _update(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(group.get(key), Tensor):
            # torchao's optimizers keep the learning rate in a tensor that is changed in place.
            group[key].fill_(value)
        elif key != "params":
            group[key] = value


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Rises linearly from 0 to the optimizer's learning rate, then falls to 0 along a cosine.

    With ``p`` the share of the steps after the warm-up that are done, the factor is
    ``max(0, (1 + cos(2 pi num_cycles p)) / 2)`` (Loshchilov and Hutter 2017).

    Args:
        optimizer: whose learning rate is set.
        num_warmup_steps: optimizer steps of the rise.
        num_training_steps: optimizer steps of the whole run.
        num_cycles: cosine waves in the fall; 0.5 ends at 0.
        last_epoch: number of steps done, minus one; -1 at the start of a run.
    """

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        done = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * done)))

    return LambdaLR(optimizer, factor, last_epoch)
