"""Full fine-tuning that steps within the backward pass."""

import pytest
import torch

from checkpointing.errors import ConfigError
from checkpointing.training.options import TrainingOptions
from checkpointing.training.step_in_backward import step_in_backward
from tests.training import runs

ALONE = ("gradient_accumulation_steps=1", "clip_grad_norm=null")
OPTIMIZERS = {
    "AdamW": ("optimizer._component_=torch.optim.AdamW",),
    "SGD with momentum": (
        "optimizer._component_=torch.optim.SGD",
        "optimizer.momentum=0.9",
    ),
    "Adafactor": ("optimizer._component_=torch.optim.Adafactor",),
    "8 bits": ("optimizer._component_=torchao.optim.AdamW8bit",),
}


def without_norms(metrics):
    return {
        step: {key: value for key, value in line.items() if key != "grad_norm"}
        for step, line in metrics.items()
    }


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_the_run_that_steps_after_it_bit_for_bit_and_so_is_a_resumed_one(tmp_path, optimizer):
    base = runs.write_base(tmp_path / "base")
    options = (*ALONE, *OPTIMIZERS[optimizer], "save_every_n_steps=2")
    runs.run("full", base, tmp_path / "after", *options)
    runs.run("full", base, tmp_path / "within", *options, "optimizer_in_bwd=true")
    expected = without_norms(runs.metrics(tmp_path / "after"))
    assert runs.metrics(tmp_path / "within") == expected
    weights = runs.weights(tmp_path / "after" / "epoch_0")
    assert runs.same(runs.weights(tmp_path / "within" / "epoch_0"), weights)
    for before in ("true", "false"):
        out = tmp_path / before
        runs.run_until(5, "full", base, out, *options, f"optimizer_in_bwd={before}")
        resumed = ("optimizer_in_bwd=true", "resume_from_checkpoint=true")
        runs.run("full", base, out, *options, *resumed)
        assert without_norms(runs.metrics(out)) == expected
        assert runs.same(runs.weights(out / "epoch_0"), weights)


def test_no_gradient_is_left_and_no_two_are_there_at_once():
    layers = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(4)))
    optimizer = torch.optim.SGD(
        [{"params": layers[:2].parameters()}, {"params": layers[2:].parameters(), "lr": 0.3}],
        lr=0.1,
    )
    alive = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in layers.parameters()))
        )
    before = [parameter.clone() for parameter in layers.parameters()]
    x = torch.randn(3, 5)
    gradients = torch.autograd.grad(layers(x).square().sum(), list(layers.parameters()))
    step_in_backward(optimizer)
    layers(x).square().sum().backward()
    assert alive == [1] * 8
    assert all(parameter.grad is None for parameter in layers.parameters())
    for number, parameter in enumerate(layers.parameters()):
        rate = 0.1 if number < 4 else 0.3
        torch.testing.assert_close(parameter, before[number] - rate * gradients[number])
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4]


@pytest.mark.parametrize("options", [{"clip_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}])
def test_what_needs_all_gradients_is_refused_beside_it(options):
    with pytest.raises(ConfigError, match="gone before their norm is known"):
        TrainingOptions(epochs=1, seed=1, optimizer_in_bwd=True, **options)
