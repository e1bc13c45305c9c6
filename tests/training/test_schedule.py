import pytest
import torch
import transformers

from checkpointing.training import get_cosine_schedule_with_warmup


def rates(make, steps, lr=0.3, **arguments):
    """Learning rates of the steps of a run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)
    schedule = make(optimizer, **arguments)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_warmup_steps": 4, "num_training_steps": 17},
        {"num_warmup_steps": 0, "num_training_steps": 5},
        {"num_warmup_steps": 9, "num_training_steps": 9},
        {"num_warmup_steps": 3, "num_training_steps": 20, "num_cycles": 1.5},
    ],
    ids=str,
)
def test_the_rates_are_those_of_transformers(arguments):
    peer = rates(transformers.get_cosine_schedule_with_warmup, 22, **arguments)
    assert rates(get_cosine_schedule_with_warmup, 22, **arguments) == pytest.approx(peer)


def test_it_rises_to_the_full_rate_and_falls_to_zero():
    found = rates(
        get_cosine_schedule_with_warmup, 9, lr=1.0, num_warmup_steps=2, num_training_steps=8
    )
    assert found[:3] == [0.0, 0.5, 1.0]
    assert found[5] == pytest.approx(0.5)
    assert found[8] == pytest.approx(0.0)


def test_a_schedule_that_starts_in_mid_run_goes_on():
    whole = rates(get_cosine_schedule_with_warmup, 12, num_warmup_steps=3, num_training_steps=12)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.3)
    optimizer.param_groups[0]["initial_lr"] = 0.3
    get_cosine_schedule_with_warmup(optimizer, 3, 12, last_epoch=7 - 1)
    assert optimizer.param_groups[0]["lr"] == whole[7]
