"""What processes of a job do with an optimizer whose parameters lie in shards."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpointing.training.optimizer_state import load_optimizer

SHAPES = ((5, 3), (4, 7), (9,))


def loaded_and_gathered() -> Counter[str]:
    """How many tensors of each kind are, after a whole state was loaded and gathered, what it had.

    The first dimensions do not divide by the number of processes.
    """
    generator = torch.Generator().manual_seed(7)
    whole = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = torch.optim.AdamW(whole)
    for parameter in whole:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    saved = optimizer.state_dict()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cuts = ([Shard(0)], [Shard(1)], [Replicate()])
    parts = [
        nn.Parameter(distribute_tensor(one.detach(), mesh, cut, src_data_rank=None))
        for one, cut in zip(whole, cuts, strict=True)
    ]
    sharded = torch.optim.AdamW(parts)
    load_optimizer(sharded, saved, [torch.float32] * 3)
    equal: Counter[str] = Counter()
    for number, parameter in enumerate(parts):
        for key, value in sharded.state[parameter].items():
            if key != "step":
                assert value.to_local().shape == parameter.to_local().shape
                value = value.full_tensor()
            equal[key] += int(torch.equal(value, saved["state"][number][key]))
    return equal
