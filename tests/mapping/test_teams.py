"""Rows of a tensor on a mesh of four processes that some of them read together, by themselves."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from checkpointing.mapping.dtensors import rows_of_dtensor
from checkpointing.mapping.tensors import Held
from tests.sharded_worker import Job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job(4, tmp_path_factory.mktemp("job"))
    yield job
    job.stop()


def read_as_teams(cut, ranges, head=1):
    """What this process and its team read of the numbers 0, 1, … by rows, and what the teams are.

    Args:
        cut: axis along which tensor parallelism cuts, before FSDP cuts the rows.
        ranges: of rows, which this process reads.
        head: of so many rows at a time the order is turned around.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(6, 12, bias=False)
    numbers = torch.arange(72.0).view(12, 6)
    layer.weight = nn.Parameter(distribute_tensor(numbers, mesh["tp"], [Shard(cut)]))
    fully_shard(layer, mesh=mesh["dp"])
    rows = rows_of_dtensor(layer.weight.detach(), "weight")
    rows = rows.map(lambda some: some.unflatten(0, (-1, head)).flip(1).flatten(0, 1), head)
    read = [rows.shards.teams.rows.read(*one).clone() for one in ranges]
    alone = rows.shards.held
    dist.barrier()
    return rows.shards.teams.held, alone, read


def expected(start, stop, head=1):
    """By hand: row n holds 6 n … 6 n + 5, and within a head the last row comes first."""
    order = [first + row for first in range(start, stop, head) for row in reversed(range(head))]
    return torch.tensor([[6.0 * row + column for column in range(6)] for row in order])


@pytest.mark.slow
def test_those_with_columns_of_the_same_rows_are_a_team(job):
    # The teams read another number of times, so that neither can be waiting for the other.
    first, second = [(0, 4), (4, 5), (5, 6)], [(7, 12)]
    answers = job.run(read_as_teams, [1] * 4, [first, first, second, second])
    for rank, (held, alone, read) in enumerate(answers):
        assert held == (Held(0, 6, (0, 1)), Held(6, 12, (2, 3)))
        assert alone == ()
        for found, place in zip(read, first if rank < 2 else second, strict=True):
            assert torch.equal(found, expected(*place))


@pytest.mark.slow
@pytest.mark.parametrize(
    "head, alone",
    [
        (3, (Held(0, 3, (0,)), Held(3, 6, (2,)), Held(6, 9, (1,)), Held(9, 12, (3,)))),
        (2, ()),
    ],
    ids=["whole heads in each process", "a head in two processes"],
)
def test_those_among_whom_rows_are_divided_again_are_a_team(job, head, alone):
    first, second = [(0, 6)] * 2, [(6, 12)]
    each = [first, second, first, second]
    answers = job.run(read_as_teams, [0] * 4, each, [head] * 4)
    for rank, (held, found_alone, read) in enumerate(answers):
        assert held == (Held(0, 6, (0, 2)), Held(6, 12, (1, 3)))
        assert found_alone == alone
        for found, place in zip(read, each[rank], strict=True):
            assert torch.equal(found, expected(*place, head))


@pytest.mark.slow
def test_a_head_that_two_teams_have_parts_of_is_for_all(job):
    answers = job.run(read_heads_of_four)
    assert answers == [((), True)] * 4


def read_heads_of_four():
    """Whether no team reads heads of 4 rows where each has 6, and all together read them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    numbers = torch.arange(72.0).view(12, 6)
    rows = rows_of_dtensor(distribute_tensor(numbers, mesh, [Shard(0), Shard(1)]), "weight")
    turned = rows.map(lambda some: some.unflatten(0, (-1, 4)).flip(1).flatten(0, 1), 4)
    teams = turned.shards.teams
    held = () if teams is None else teams.held
    return held, torch.equal(turned.read_all(), expected(0, 12, 4))
