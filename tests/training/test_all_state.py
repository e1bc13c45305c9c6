"""All that has state is saved and restored: the steps after a resume are those without one."""

import math
import random

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from checkpointing.resume import check_recipe_state, load_recipe_state
from checkpointing.training import DiskLogger, Schedule
from checkpointing.training.optimizer_state import load_optimizer
from tests.training import runs
from tests.training.runs import checkpoints, metrics, run, run_until, same, weights

SAVING = "save_every_n_steps=3"
RESUME = "resume_from_checkpoint=True"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


def resumes_bit_for_bit(kind, base, out, *settings):
    """Compares a run that is stopped in mid-epoch and goes on with one that is not."""
    settings = (SAVING, "save_adapter_weights_only=True", *settings)
    settings = [each for each in settings if kind == "lora" or "adapter" not in each]
    run(kind, base, out / "whole", *settings)
    run_until(7, kind, base, out / "stopped", *settings)
    assert "step_6" in checkpoints(out / "stopped")
    torch.manual_seed(1234)
    run(kind, base, out / "stopped", *settings, RESUME)
    found, expected = metrics(out / "stopped"), metrics(out / "whole")
    assert found == expected
    assert len({line["loss"] for line in expected.values()}) == 8
    assert same(weights(out / "stopped/epoch_1"), weights(out / "whole/epoch_1"))
    assert same(optimizer_state(out / "stopped"), optimizer_state(out / "whole"))
    return expected


def optimizer_state(out):
    """The optimizer's tensors at the end, by the parameter's number and their names."""
    state = load_recipe_state(out / "epoch_1/recipe_state.pt")["optimizer"]["state"]
    return {
        f"{number}.{key}": torch.as_tensor(value)
        for number, values in state.items()
        for key, value in values.items()
    }


# Optimizers

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "AdamW": {"foreach": True},
    "AdamW amsgrad": {"amsgrad": True},
    "AdamW fused": {"fused": True},
    "Adafactor": {},
    "Muon": {},
    "NAdam": {"momentum_decay": 0.1},
    "RAdam": {},
    "ASGD": {"t0": 3},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {},
    "Adamax": {},
    "Adadelta": {},
    "Rprop": {},
}


def optimizer(name):
    """Overrides of a recipe's config."""
    component, arguments = name.split()[0], OPTIMIZERS[name]
    if not hasattr(torch.optim, component):
        pytest.skip(f"this torch has no {component}")
    overrides = [f"+optimizer.{key}={value}" for key, value in arguments.items()]
    return (f"optimizer=torch.optim.{component}", *overrides)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(base, tmp_path, name):
    resumes_bit_for_bit("lora", base, tmp_path, *optimizer(name))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "NAdam", "RAdam", "ASGD"])
def test_so_it_does_in_bf16_though_part_of_its_state_is_fp32(base, tmp_path, name):
    resumes_bit_for_bit("full", base, tmp_path, *optimizer(name), "dtype=bf16")


def test_a_state_keeps_its_dtype_where_the_parameters_keep_theirs():
    def made(dtype, state=None, dtypes=()):
        parameter = torch.nn.Parameter(torch.full((2, 3), 0.7, dtype=dtype))
        adam = torch.optim.NAdam([parameter])
        if state is not None:
            load_optimizer(adam, state, dtypes)
        parameter.grad = torch.full_like(parameter, 0.3)
        adam.step()
        return adam.state[parameter], adam.state_dict()

    first, saved = made(torch.bfloat16)
    assert (first["exp_avg"].dtype, first["mu_product"].dtype) == (torch.bfloat16, torch.float32)
    same_dtype, _ = made(torch.bfloat16, saved, [torch.bfloat16])
    assert same_dtype["mu_product"].dtype == torch.float32
    # 0.9 * (1 - 0.5 * 0.96**(0.004 * step)) for both steps (Dozat 2016; momentum_decay 0.004).
    product = math.prod(0.9 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in (1, 2))
    assert same_dtype["mu_product"].item() == pytest.approx(product, rel=1e-6)
    other_dtype, _ = made(torch.float32, saved, [torch.bfloat16])
    assert other_dtype["exp_avg"].dtype == torch.float32


# Schedules


def sequential(optimizer):
    """A schedule of two, which no config can write."""
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=3)
    then = lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[5])


def chained(optimizer):
    """A schedule that multiplies two."""
    first = lr_scheduler.ConstantLR(optimizer, factor=0.3, total_iters=7)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.StepLR(optimizer, 3, 0.7)])


SCHEDULES = {
    "StepLR": {"step_size": 3, "gamma": 0.7},
    "MultiStepLR": {"milestones": [2, 7], "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.8},
    "LinearLR": {"total_iters": 7},
    "PolynomialLR": {"total_iters": 9, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "OneCycleLR": {"max_lr": 0.01, "total_steps": 8},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.02, "step_size_up": 3},
    "ReduceLROnPlateau": {"patience": 0, "threshold": 0.3, "factor": 0.6},
    "sequential": {},
    "chained": {},
}


def schedule(name, **changed):
    """Overrides of a recipe's config."""
    package = "tests.training.test_all_state" if name.islower() else "torch.optim.lr_scheduler"
    arguments = {**SCHEDULES[name], **changed}
    added = [f"+lr_scheduler.{key}={value}" for key, value in arguments.items()]
    return (f"lr_scheduler={package}.{name}", "~lr_scheduler.num_warmup_steps", *added)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_bit_for_bit(base, tmp_path, name):
    # CyclicLR and OneCycleLR change the momentum too.
    momentum = ("optimizer=torch.optim.SGD", "+optimizer.momentum=0.9")
    steps = resumes_bit_for_bit("lora", base, tmp_path, *momentum, *schedule(name))
    assert len({line["lr"] for line in steps.values()}) > 1


def rates(out):
    return [line["lr"] for _, line in sorted(metrics(out).items())]


@pytest.mark.parametrize("name", ["StepLR", "ExponentialLR", "CyclicLR", "sequential"])
def test_with_other_settings_a_schedule_goes_on_as_if_they_had_always_been_so(base, tmp_path, name):
    momentum = ("optimizer=torch.optim.SGD", "+optimizer.momentum=0.9")
    changed = {"gamma": 0.4} if "gamma" in SCHEDULES[name] else {}
    new = (*momentum, *schedule(name, **changed), "optimizer.lr=0.007")
    run("lora", base, tmp_path / "whole", *new)
    run("lora", base, tmp_path / "out", *momentum, *schedule(name), "epochs=1")
    before = rates(tmp_path / "out")
    run("lora", base, tmp_path / "out", *new, RESUME)
    whole = rates(tmp_path / "whole")
    assert rates(tmp_path / "out") == before + whole[4:]
    assert before != whole[:4] or name == "CyclicLR"  # which does not look at optimizer.lr


def test_a_schedule_that_looks_at_the_loss_keeps_its_memory_when_epochs_are_added(base, tmp_path):
    settings = (*schedule("ReduceLROnPlateau"), "optimizer.lr=0.02")
    run("lora", base, tmp_path / "two", *settings)
    run("lora", base, tmp_path / "added", *settings, "epochs=1")
    run("lora", base, tmp_path / "added", *settings, RESUME)
    assert metrics(tmp_path / "added") == metrics(tmp_path / "two")
    state = load_recipe_state(tmp_path / "added/epoch_1/recipe_state.pt")["lr_scheduler"]["state"]
    losses = [line["loss"] for line in metrics(tmp_path / "two").values()]
    assert state["best"] in losses


def test_the_state_of_every_scheduler_of_torch_can_be_saved_and_read(tmp_path):
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    for name, arguments in SCHEDULES.items():
        make = globals()[name] if name.islower() else getattr(lr_scheduler, name)
        state = Schedule(made, make(made, **arguments), {}).state_dict()
        check_recipe_state(state)
        torch.save(state, tmp_path / "state.pt")
        assert load_recipe_state(tmp_path / "state.pt") == state, name


# Random numbers


class DrawingLogger(DiskLogger):
    """Notes with each step numbers that the generators of Python, numpy and torch give."""

    def log_dict(self, payload, step):
        drawn = {
            "python": random.random() + random.gauss(0, 1),
            "numpy": numpy.random.rand(),
            "torch": torch.rand(()).item(),
        }
        super().log_dict({**payload, **drawn}, step)


def test_a_resumed_run_draws_the_random_numbers_of_the_uninterrupted_one(base, tmp_path):
    logger = "metric_logger=tests.training.test_all_state.DrawingLogger"
    settings = (SAVING, "save_adapter_weights_only=True", logger, "~lr_scheduler")
    run("lora", base, tmp_path / "whole", *settings)
    run("lora", base, tmp_path / "out", *settings, "epochs=1")
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    run("lora", base, tmp_path / "out", *settings, RESUME)
    whole = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "out") == whole
    for source in ("python", "numpy", "torch"):
        assert len({line[source] for line in whole.values()}) == 8
