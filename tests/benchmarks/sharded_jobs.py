"""Two processes that save one Hugging Face directory of a model that is sharded over them.

    python sharded_jobs.py SIDE RANK BASE OUT

says that it is ready, starts when it is told to, and says when it is done. The shards are those of
FSDP2: each process has half of the rows of each tensor.
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

_RANKS = 2
_FILE_BYTES = 10**9


def save(base: str, out: str) -> Callable[[], Any]:
    """With this project's checkpointer."""
    return _started("ours", base, out)


def save_dcp(base: str, out: str) -> Callable[[], Any]:
    """With the writer of torch's distributed checkpoints that consolidates the shards' files."""
    return _started("dcp", base, out)


def _started(side: str, base: str, out: str) -> Callable[[], Any]:
    from tests.benchmarks.durable import cleared

    cleared(Path(out))
    script, store = Path(__file__).resolve(), tempfile.mkdtemp()
    environment = os.environ | {"PYTHONPATH": str(script.parents[2]), "STORE": f"{store}/ranks"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, side, str(rank), base, out],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    _expect(processes, "ready")

    def run() -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        _expect(processes, "done")

    return run


def _expect(processes: list["subprocess.Popen[str]"], word: str) -> None:
    for process in processes:
        assert process.stdout is not None
        said = process.stdout.readline()
        if said.strip() != word:
            raise RuntimeError(f"a process said {said!r}, not {word}; see above for its error")


def _rank(side: str, rank: int, base: Path, out: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{os.environ['STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_RANKS)
    job = (_ours if side == "ours" else _dcp)(base, out)
    print("ready", flush=True)
    sys.stdin.readline()
    job()
    dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()


def _ours(base: Path, out: Path) -> Callable[[], Any]:
    from checkpointing import FullModelHFCheckpointer

    checkpointer = FullModelHFCheckpointer(base, output_dir=out, max_shard_size=_FILE_BYTES)
    state = {"model": _shards(checkpointer.load_checkpoint()["model"])}
    return partial(checkpointer.save_checkpoint, state, epoch=0, show_progress=False)


def _dcp(base: Path, out: Path) -> Callable[[], Any]:
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
    state = _shards(weights)

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


def _shards(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, rank = init_device_mesh("cpu", (_RANKS,)), dist.get_rank()
    return {
        name: DTensor.from_local(
            tensor.chunk(_RANKS)[rank].clone(),
            mesh,
            [Shard(0)],
            shape=tensor.shape,
            stride=tensor.stride(),
            run_check=False,
        )
        for name, tensor in weights.items()
    }


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
