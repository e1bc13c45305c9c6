"""Processes of one job of torch.distributed, and what they are asked to do in the tests."""

import multiprocessing
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from checkpointing import (
    AdapterConfig,
    AsyncCheckpointer,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
    MergedStateDict,
)
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.shared_file import shared_file
from checkpointing.training import build_decoder

_SECONDS = 120
CLASSES = {
    "hf": FullModelHFCheckpointer,
    "meta": FullModelMetaCheckpointer,
    "tune": FullModelTorchTuneCheckpointer,
}


class Job:
    """Processes that run the same functions, until they are stopped.

    Args:
        count: number of processes.
        directory: where they find each other.
    """

    def __init__(self, count: int, directory: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            mine, its = spawn.Pipe()
            arguments = (rank, count, str(directory / "store"), its)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *each: Any, **arguments: Any) -> list[Any]:
        """What the function returns, or raises, in each process.

        Args:
            function: of a module that can be imported.
            each: arguments, of each a list with one for each process.
            arguments: the same for all.
        """
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, [one[rank] for one in each], arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_SECONDS):
                self.stop()
                raise TimeoutError(f"rank {rank} does not answer")
            answers.append(pipe.recv())
        return answers

    def __len__(self) -> int:
        return len(self._processes)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        function, positional, arguments = pipe.recv()
        try:
            answer = function(*positional, **arguments)
        except Exception as error:
            # Some errors cannot be pickled as they are.
            answer = (type(error), str(error))
        pipe.send(answer)


def mesh_of(*shape: int) -> DeviceMesh:
    """All processes in a grid."""
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def by_fsdp(
    checkpointer: Any, weights: dict[str, Tensor], mesh: DeviceMesh | None = None
) -> dict[str, Tensor]:
    """The weights as they are in a decoder that FSDP2 has cut, layer by layer.

    Args:
        checkpointer: of the weights.
        weights: of the decoder.
        mesh: of two dimensions, if matrices are cut by tensor parallelism along the second before.
    """
    model = build_decoder(checkpointer.model_config, weights, next(iter(weights.values())).dtype)
    if mesh is not None:
        for name, module in model.named_modules():
            for own, parameter in list(module.named_parameters(recurse=False)):
                way = [_tensor_parallel(f"{name}.{own}")]
                cut = distribute_tensor(parameter.data, mesh["tp"], way, src_data_rank=None)
                setattr(module, own, nn.Parameter(cut))
    along = mesh_of() if mesh is None else mesh["dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=along)
    fully_shard(model, mesh=along)
    return model.state_dict()


ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
# Of a mesh: its shape for each number of processes, and what is done to a matrix and a vector.
CUTS: dict[str, tuple[dict[int, tuple[int, ...]], list[Placement], list[Placement]]] = {
    "rows": ({2: (2,), 4: (4,)}, [ROWS], [ROWS]),
    "columns": ({2: (2,), 4: (4,)}, [COLUMNS], [ROWS]),
    "copies": ({2: (2,), 4: (4,)}, [COPIES], [COPIES]),
    "rows, with copies": ({2: (1, 2), 4: (2, 2)}, [COPIES, ROWS], [COPIES, ROWS]),
    "rows of copies": ({2: (2, 1), 4: (2, 2)}, [ROWS, COPIES], [ROWS, COPIES]),
    "rows twice": ({2: (2, 1), 4: (2, 2)}, [ROWS, ROWS], [ROWS, ROWS]),
    "rows and columns": ({2: (1, 2), 4: (2, 2)}, [ROWS, COLUMNS], [ROWS, COPIES]),
}
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "w1", "w3", "output", "tok_embeddings")


def placed(weights: dict[str, Tensor], cut: str) -> dict[str, Tensor]:
    """The weights cut in a way that has a name here."""
    if cut == "tensor parallel":
        mesh = mesh_of()
        ways = {name: [_tensor_parallel(name)] for name in weights}
    else:
        shapes, matrix, vector = CUTS[cut]
        mesh = mesh_of(*shapes[dist.get_world_size()])
        ways = {name: matrix if one.dim() > 1 else vector for name, one in weights.items()}
    # All have the whole weights, so that nothing need be sent.
    return {
        name: distribute_tensor(one, mesh, ways[name], src_data_rank=None)
        for name, one in weights.items()
    }


def _tensor_parallel(name: str) -> Placement:
    if "norm" in name or name.endswith("output_proj.bias") or name.endswith("w2.bias"):
        return COPIES
    return ROWS if name.split(".")[-2] in _BY_ROWS else COLUMNS


@contextmanager
def _nothing_gathered() -> Iterator[None]:
    def refuse(self: DTensor, **options: Any) -> Tensor:
        raise AssertionError("gathered a tensor")

    original, DTensor.full_tensor = DTensor.full_tensor, refuse
    try:
        yield
    finally:
        DTensor.full_tensor = original


def save(
    format: str,
    base: Path,
    out: Path,
    cut: str,
    gathers: bool = True,
    options: dict[str, Any] | None = None,
    adapter: tuple[dict[str, Tensor], AdapterConfig, bool] | None = None,
    **arguments: Any,
) -> Path:
    """Saves the weights of a base, cut.

    Args:
        format: of the base.
        base: its directory.
        out: output directory.
        cut: a name in ``CUTS``, ``"tensor parallel"``, ``"fsdp"`` or ``"fsdp over tensor
            parallel"``.
        gathers: whether any tensor may be gathered.
        options: of the checkpointer.
        adapter: is merged into the weights, and saved: its tensors, its config, and whether these
            are cut too.
        arguments: of the save.
    """
    checkpointer = CLASSES[format](base, output_dir=out, **(options or {}))
    weights = checkpointer.load_checkpoint()["model"]
    cut_weights: Any
    if cut == "fsdp":
        cut_weights = by_fsdp(checkpointer, weights)
    elif cut == "fsdp over tensor parallel":
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        cut_weights = by_fsdp(checkpointer, weights, mesh)
    else:
        cut_weights = placed(weights, cut)
    state: dict[str, Any] = {"epochs_run": 1, "steps_run": 7}
    if adapter is not None:
        tensors, config, is_cut = adapter
        state |= {"adapter": tensors, "adapter_config": config.to_state()}
        cut_weights = MergedStateDict(
            cut_weights, placed(tensors, "rows") if is_cut else tensors, config
        )
    if gathers:
        return checkpointer.save_checkpoint(
            {"model": cut_weights, **state}, epoch=0, show_progress=False, **arguments
        )
    with _nothing_gathered():
        return checkpointer.save_checkpoint(
            {"model": cut_weights, **state}, epoch=0, show_progress=False, **arguments
        )


def save_with_little_room(room: int | None, **arguments: Any) -> Path:
    """As :func:`save`, while no file may become larger than a number of bytes."""
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (old if room is None else room, most))
    try:
        return save(**arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))


def save_changed(changes: dict[str, Any], base: Path, out: Path, is_async: bool = False) -> Path:
    """Saves weights of which some are replaced, after they were cut by rows.

    Args:
        changes: by native name; ``None`` leaves one out. A key that has no dot is one of the state
            dict's.
        base: directory of the base, of Hugging Face's format.
        out: output directory.
        is_async: in the background.
    """
    checkpointer: Any = FullModelHFCheckpointer(base, output_dir=out)
    weights = checkpointer.load_checkpoint()["model"]
    weights |= {name: one for name, one in changes.items() if "." in name}
    weights = {name: one for name, one in weights.items() if one is not None}
    state = {name: one for name, one in changes.items() if "." not in name}
    if is_async:
        checkpointer = AsyncCheckpointer(checkpointer)
    saved = checkpointer.save_checkpoint({"model": placed(weights, "rows"), **state}, epoch=0)
    checkpointer.wait()
    return saved


def save_with_an_optimizer(base: Path, out: Path) -> Path:
    """Saves a decoder that FSDP2 has cut, with the state of its optimizer as it is."""
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    weights = by_fsdp(checkpointer, checkpointer.load_checkpoint()["model"])
    parameters = [nn.Parameter(one) for one in weights.values()]
    optimizer = torch.optim.AdamW(parameters)
    for one in parameters:
        one.grad = one.detach().clone()
    optimizer.step()
    return checkpointer.save_checkpoint(
        {"model": weights, "optimizer": optimizer.state_dict()}, epoch=0, show_progress=False
    )


def save_sums(base: Path, out: Path) -> Path:
    """Saves weights of which each process has one summand."""
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    weights = checkpointer.load_checkpoint()["model"]
    rank, mesh = dist.get_rank(), mesh_of()
    sums = {
        # Halves are exact, and their sum is what was halved.
        name: DTensor.from_local(one * 0.5 if rank < 2 else one * 0, mesh, [Partial()])
        for name, one in weights.items()
    }
    return checkpointer.save_checkpoint({"model": sums}, epoch=0, show_progress=False)


def save_on_a_part_of_the_job(base: Path, out: Path) -> Path:
    """Saves weights that lie in a mesh of the first process alone."""
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    weights = checkpointer.load_checkpoint()["model"]
    mesh = DeviceMesh("cpu", [0])
    cut = {name: DTensor.from_local(one, mesh, [Shard(0)]) for name, one in weights.items()}
    return checkpointer.save_checkpoint({"model": cut}, epoch=0, show_progress=False)


def open_shared(path: Path) -> None:
    """Opens a file that all processes write."""
    with shared_file(path, Ranks(dist.group.WORLD)):
        pass
