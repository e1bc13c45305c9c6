"""What processes of a job are asked to do with distributed checkpoints in the tests."""

import errno
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from checkpointing.distributed_checkpointer import DistributedCheckpointer
from tests.crash.hooks import watching
from tests.crash.watchers import Faulty

# No size is a multiple of four, so that no two processes have parts of one size.
VOCAB, HIDDEN, FFN = 23, 11, 18


class Net(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.down(self.up(self.embedding(tokens))))


def built(layout: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is cut, and an optimizer that has taken a step with gradients of its own.

    Args:
        layout: ``"whole"``, ``"fsdp"``, ``"tensor parallel"`` or ``"fsdp over tensor parallel"``.
        dtype: of the weights.
        seed: another one gives other weights and gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Net().to(dtype)
    gradients = {}
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
        gradients[name] = torch.randn(parameter.shape, generator=generator).to(dtype)
    count = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "tensor parallel":
        _cut_matrices(model, init_device_mesh("cpu", (count,)))
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    elif layout == "fsdp over tensor parallel":
        mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
        _cut_matrices(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        if isinstance(parameter, DTensor):
            mesh, cuts = parameter.device_mesh, parameter.placements
            # By way of whole copies: what FSDP has cut over tensor parallelism is cut in two steps.
            whole = distribute_tensor(gradient, mesh, src_data_rank=None)
            gradient = whole.redistribute(placements=cuts)
        parameter.grad = gradient
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / seed, foreach=False)
    optimizer.step()
    return model, optimizer


def _cut_matrices(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, plain: bool, seed: int
) -> dict[str, Any]:
    """All that a run has, as it is saved.

    Args:
        model: of the run.
        optimizer: of the run.
        plain: the optimizer's own state, with numbers for the parameters.
        seed: another one gives other numbers and texts.
    """
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()
        if plain
        else get_optimizer_state_dict(model, optimizer),
        "steps_run": seed,
        "run": {"recipe": f"recipe {seed}", "betas": (0.5, seed), "losses": [seed, None, True]},
        "rng": torch.Generator().manual_seed(seed).get_state(),
    }


def whole(content: Any) -> Any:
    """A state with whole tensors, in memory of their own."""
    if isinstance(content, Mapping):
        return {key: whole(value) for key, value in content.items()}
    if isinstance(content, list):
        return [whole(value) for value in content]
    if isinstance(content, DTensor):
        return content.full_tensor().detach().clone()
    return content.detach().clone() if isinstance(content, Tensor) else content


def save(out: Path, layout: str, dtype: torch.dtype, plain: bool, seed: int, **options: Any) -> Any:
    """Saves a state; returns it as it was then."""
    state = state_of(*built(layout, dtype, seed), plain, seed)
    expected = whole(state)
    DistributedCheckpointer(out, out).save_checkpoint(state, **{"epoch": 0, **options})
    return expected


def save_on_a_disk(full_at: int | None, out: Path, **arguments: Any) -> Any:
    """As :func:`save`, where the disk of some processes has no room from a number of calls on."""
    if full_at is None:
        return save(out, **arguments)
    with watching(out, Faulty(errno.ENOSPC, full_at, lasting=True)):
        return save(out, **arguments)


def load(out: Path, layout: str, dtype: torch.dtype, plain: bool) -> Any:
    """Loads into the state of another run, which is returned."""
    state = state_of(*built(layout, dtype, seed=5), plain, seed=5)
    return whole(DistributedCheckpointer(out, out).load_checkpoint(state))


def save_and_change(out: Path, layout: str, count: int) -> list[Any]:
    """Saves in the background, and changes everything as soon as it can; returns what was saved."""
    checkpointer = DistributedCheckpointer(out, out)
    model, optimizer = built(layout, torch.bfloat16, seed=3)
    state = state_of(model, optimizer, True, seed=3)
    expected = []
    for step in range(count):
        state["steps_run"] = step
        state["optimizer"]["param_groups"][0]["lr"] = step / 8
        expected.append(whole(state))
        checkpointer.save_checkpoint(state, 0, save_async=True, dir_prefix="step", step=step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
                for moment in ("exp_avg", "exp_avg_sq", "step"):
                    optimizer.state[parameter][moment].add_(1)
        state["rng"].add_(1)
        state["run"]["losses"].append(step)
        # Training talks to the others in the meantime.
        dist.all_reduce(torch.ones(1000))
    checkpointer.wait()
    return expected


def load_steps(out: Path, layout: str, count: int) -> list[Any]:
    """What was saved at each step."""
    found = []
    for step in range(count):
        state = state_of(*built(layout, torch.bfloat16, seed=5), True, seed=5)
        path = out / f"step_{step}"
        found.append(whole(DistributedCheckpointer(out, out).load_checkpoint(state, path)))
    return found


def save_each_its_own(out: Path) -> dict[str, Any]:
    """Saves what is not the same in all processes; loads it again."""
    rank = dist.get_rank()
    state = {"number": rank, "tensor": torch.full((3,), rank), f"rank {rank}": {"own": rank + 7}}
    checkpointer = DistributedCheckpointer(out, out)
    checkpointer.save_checkpoint(state, epoch=0)
    return checkpointer.load_checkpoint(
        {"number": None, "tensor": torch.zeros(3, dtype=torch.int64), f"rank {rank}": {"own": 0}}
    )


def save_sums(out: Path) -> None:
    """Saves a tensor of which each process has a summand."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(3, 5), mesh, [Partial()])
    DistributedCheckpointer(out, out).save_checkpoint({"model": {"sum": tensor}}, epoch=0)


def save_value(value: Any, out: Path, **options: Any) -> None:
    """Saves a state of one value."""
    DistributedCheckpointer(out, out).save_checkpoint({"value": value}, **{"epoch": 0, **options})


def save_by_a_part_of_the_job(out: Path) -> list[str]:
    """Saves from the last process alone; returns the names of what it has written."""
    rank = dist.get_world_size() - 1
    group = dist.new_group([rank], backend="gloo")
    if dist.get_rank() == rank:
        DistributedCheckpointer(out, out, group).save_checkpoint({"rank": rank}, epoch=0)
    dist.barrier()
    return sorted(path.name for path in (out / "epoch_0").iterdir())


class _DyingWriter:
    """Ends the process in the middle of a write."""

    def __init__(self) -> None:
        from checkpointing import dcp_write

        self._kind = dcp_write._DigestedFile
        self._write = self._kind.write

    def install(self) -> None:
        def write(file: Any, data: Any) -> int:
            if file.tell() > 4000:
                os.kill(os.getpid(), signal.SIGKILL)
            return self._write(file, data)

        self._kind.write = write


def save_and_die(dies: bool, out: Path, save_async: bool) -> None:
    """Saves; some processes are killed on the way."""
    if dies:
        _DyingWriter().install()
    state = state_of(*built("fsdp", torch.float32, seed=3), True, seed=3)
    checkpointer = DistributedCheckpointer(out, out)
    checkpointer.save_checkpoint(state, epoch=1, save_async=save_async)
    checkpointer.wait()
