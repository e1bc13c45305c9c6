"""Processes that save one Hugging Face directory of a model that is sharded over them.

    python sharded_jobs.py SIDE RANK RANKS TENSOR_PARALLEL BASE OUT

says that it is ready, starts when it is told to, and says when it is done. The shards are those of
FSDP2, which cuts the rows of each tensor; with tensor parallelism before it the columns of some.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.benchmarks.figures import Figures

_FILE_BYTES = 10**9
# What tensor parallelism cuts along the columns.
_BY_COLUMNS = ("output_proj.weight", "w2.weight")


def save(base: str, out: str, ranks: int = 2, tensor_parallel: int = 1) -> Callable[[], Any]:
    """With this project's checkpointer."""
    return _started("ours", base, out, ranks, tensor_parallel)[0]


def save_dcp(base: str, out: str, ranks: int = 2, tensor_parallel: int = 1) -> Callable[[], Any]:
    """With the writer of torch's distributed checkpoints that consolidates the shards' files."""
    return _started("dcp", base, out, ranks, tensor_parallel)[0]


def memory_of_save(base: str, out: str, ranks: int, tensor_parallel: int) -> Callable[[], Any]:
    """By how much the first process grows while they save, in bytes of private memory."""
    from tests.benchmarks.memory import memory_while

    run, first = _started("ours", base, out, ranks, tensor_parallel)
    return lambda: Figures(private=memory_while(first, run).private)


def _started(
    side: str, base: str, out: str, ranks: int, tensor_parallel: int
) -> tuple[Callable[[], Any], int]:
    """What starts the save and waits for it, and the number of the first process."""
    from tests.benchmarks.durable import cleared

    cleared(Path(out))
    script, store = Path(__file__).resolve(), tempfile.mkdtemp()
    environment = os.environ | {"PYTHONPATH": str(script.parents[2]), "STORE": f"{store}/ranks"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, side, *map(str, (rank, ranks, tensor_parallel)), base, out],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    _expect(processes, "ready")

    def run() -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        _expect(processes, "done")

    return run, processes[0].pid


def _expect(processes: list["subprocess.Popen[str]"], word: str) -> None:
    for process in processes:
        assert process.stdout is not None
        said = process.stdout.readline()
        if said.strip() != word:
            raise RuntimeError(f"a process said {said!r}, not {word}; see above for its error")


def _rank(side: str, rank: int, ranks: int, tensor_parallel: int, base: Path, out: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{os.environ['STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    job = (_ours if side == "ours" else _dcp)(base, out, tensor_parallel)
    print("ready", flush=True)
    sys.stdin.readline()
    job()
    dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()


def _ours(base: Path, out: Path, tensor_parallel: int) -> Callable[[], Any]:
    from checkpointing import FullModelHFCheckpointer

    checkpointer = FullModelHFCheckpointer(base, output_dir=out, max_shard_size=_FILE_BYTES)
    state = {"model": _shards(checkpointer.load_checkpoint()["model"], tensor_parallel)}
    return partial(checkpointer.save_checkpoint, state, epoch=0, show_progress=False)


def _dcp(base: Path, out: Path, tensor_parallel: int) -> Callable[[], Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    from checkpointing.mapping.tensors import meta_of
    from checkpointing.storage.write import plan_shards
    from tests.benchmarks.durable import sync_tree

    weights: dict[str, Tensor] = {}
    for file in sorted(base.glob("*.safetensors")):
        weights |= load_file(file)
    files = plan_shards({name: meta_of(tensor) for name, tensor in weights.items()}, _FILE_BYTES)
    state = _shards(weights, tensor_parallel)

    def run() -> None:
        writer = dcp.HuggingFaceStorageWriter(
            str(out),
            fqn_to_index_mapping={name: i for i, names in enumerate(files, 1) for name in names},
            save_distributed=True,
            enable_consolidation=True,
            thread_count=2,
            thread_count_consolidation=2,
        )
        dcp.save(state, storage_writer=writer)
        if dist.get_rank() == 0:
            sync_tree(out)

    return run


def _shards(weights: Mapping[str, Tensor], tensor_parallel: int) -> dict[str, Tensor]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return {name: _shard(name, tensor, mesh) for name, tensor in weights.items()}


def _shard(name: str, tensor: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    cuts = [Shard(0), Shard(1) if name.endswith(_BY_COLUMNS) else Replicate()]
    # All have the whole weights, so that nothing need be sent; what is kept is memory of its own.
    part = distribute_tensor(tensor, mesh, cuts, src_data_rank=None).to_local().clone()
    return DTensor.from_local(part, mesh, cuts, shape=tensor.shape, stride=tensor.stride())


if __name__ == "__main__":
    numbers = map(int, sys.argv[2:5])
    _rank(sys.argv[1], *numbers, *map(Path, sys.argv[5:]))
