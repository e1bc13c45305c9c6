"""A decoder whose weights lie in parts on many ranks: FSDP2, tensor parallelism, or both.

What is done in turn, so that no rank ever holds the model::

    mesh = make_mesh(device, tensor_parallel=2)
    model = empty_decoder(checkpointer.model_config, dtype)
    add_adapter(model, adapter_config)
    parallelize(model, mesh)
    materialize(model, device)
    checkpointer.load_into(base_state_dict(model))
    init_adapter(model)
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from checkpointing.errors import ConfigError
from checkpointing.nf4 import is_nf4
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.tensor_parallel import cut_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

DATA, TENSOR = "dp", "tp"


def make_mesh(device: torch.device, tensor_parallel: int = 1) -> "DeviceMesh":
    """All ranks of the job in a grid; those of a row share each layer's computation.

    Args:
        device: of this rank, where its part of the model will be.
        tensor_parallel: number of ranks in a row.

    Returns:
        A mesh with the dimensions ``dp``, whose ranks see different data, and ``tp``, whose ranks
        see the same.

    Raises:
        ConfigError: if the ranks do not fill rows of that length.
    """
    from torch.distributed.device_mesh import init_device_mesh

    ranks = dist.get_world_size()
    if tensor_parallel < 1 or ranks % tensor_parallel:
        divisors = [str(one) for one in range(1, ranks + 1) if ranks % one == 0]
        raise ConfigError(
            f"tensor_parallel_dim={tensor_parallel}: the job has {ranks} ranks, which it must "
            f"divide; set it to {' or '.join(divisors)}, or start another number of processes"
        )
    shape = (ranks // tensor_parallel, tensor_parallel)
    return init_device_mesh(device.type, shape, mesh_dim_names=(DATA, TENSOR))


def parallelize(model: TransformerDecoder, mesh: "DeviceMesh") -> None:
    """Cuts a decoder's parameters over the ranks, in place: each becomes a ``DTensor``.

    The matrices are cut over ``tp`` first, if it has several ranks, and everything over ``dp``
    after that, by FSDP2, which gathers one layer at a time to compute with it. The gradient is the
    sum over the ranks of ``dp``, not the mean: so the loss of a rank is to be its share of the
    loss of all.

    Args:
        model: on the meta device, or with the same weights on all ranks; with its adapter, if it
            gets one.
        mesh: from :func:`make_mesh`.

    Raises:
        ConfigError: if the model cannot be cut so; nothing is changed then.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if any(map(is_nf4, model.parameters())):
        raise ConfigError(
            "model.quantize_base=True: a base in NF4 cannot be cut over several ranks; set it to "
            "False, or train on one device"
        )
    if mesh[TENSOR].size() > 1:
        cut_tensors(model, mesh[TENSOR])
    # Sums over many ranks lose less in fp32. The root gathers its own anew in the backward pass,
    # so that its parameters are cut whenever no pass runs.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    dim = partial(_dim_to_cut, ranks=mesh[DATA].size())
    for module in (*model.layers, model):
        fully_shard(
            module,
            mesh=mesh[DATA],
            mp_policy=policy,
            reshard_after_forward=True,
            shard_placement_fn=dim,
        )
        assert isinstance(module, FSDPModule)  # which fully_shard has made of it
        module.set_gradient_divide_factor(1.0)
        # Other backends than nccl have only this.
        module.set_force_sum_reduction_for_comms(True)


def _dim_to_cut(parameter: nn.Parameter, ranks: int) -> "Shard":
    """Rows, unless they are fewer experts than ranks, of which some would have nothing."""
    from torch.distributed.tensor import Shard

    if parameter.dim() == 3 and len(parameter) < ranks:
        cut = {one.dim for one in getattr(parameter, "placements", ()) if one.is_shard()}
        for dim in (1, 2):
            # FSDP2 cuts other dimensions than the first only into parts of the same size.
            if dim not in cut and parameter.shape[dim] % ranks == 0:
                return Shard(dim)
    return Shard(0)


def materialize(model: TransformerDecoder, device: torch.device) -> None:
    """Takes memory for this rank's part of all parameters; what they hold is to be loaded."""
    model.to_empty(device=device)
