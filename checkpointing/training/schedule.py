"""Learning-rate schedules."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


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
