"""Processes of one job of torch.distributed, and what they are asked to do in the tests."""

import gc
import multiprocessing
import resource
import threading
import time
from collections import Counter
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
from torch.utils._pytree import tree_map_only

from checkpointing import (
    AdapterConfig,
    AsyncCheckpointer,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
    MergedStateDict,
)
from checkpointing.resume import load_recipe_state
from checkpointing.storage import shared_work as storage_of_shards
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.shared_file import shared_file
from checkpointing.training import build_decoder
from tests.tiny import random_adapter

_SECONDS = 300
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
    if ".lora_a." in name:
        return COPIES if name.split(".")[-3] in _BY_ROWS else COLUMNS
    if ".lora_b." in name:
        return ROWS if name.split(".")[-3] in _BY_ROWS else COPIES
    if name.endswith("magnitude"):
        return ROWS if name.split(".")[-2] in _BY_ROWS else COPIES
    if "experts.lora_" in name:
        return ROWS  # whole experts, as expert parallelism has them
    return ROWS if name.split(".")[-2] in _BY_ROWS else COLUMNS


@contextmanager
def gathered_in_ranges_of(size: int) -> Iterator[None]:
    """Within the block so many bytes are gathered at a time."""
    usual, storage_of_shards.GATHERED_RANGE = storage_of_shards.GATHERED_RANGE, size
    try:
        yield
    finally:
        storage_of_shards.GATHERED_RANGE = usual


@contextmanager
def gathering_no_more_than(most: int) -> Iterator[None]:
    """Within the block no tensor of more elements may be gathered."""
    original = DTensor.full_tensor

    def full_tensor(self: DTensor, **options: Any) -> Tensor:
        if self.numel() > most:
            raise AssertionError(f"gathered a tensor {list(self.shape)}")
        return original(self, **options)

    DTensor.full_tensor = full_tensor
    try:
        yield
    finally:
        DTensor.full_tensor = original


def save(
    format: str,
    base: Path,
    out: Path,
    cut: str,
    most_gathered: int = 1 << 40,
    options: dict[str, Any] | None = None,
    adapter: tuple[dict[str, Tensor], AdapterConfig, str | None] | None = None,
    is_async: bool = False,
    leave_out: str = "",
    range_bytes: int = storage_of_shards.GATHERED_RANGE,
    **arguments: Any,
) -> Path:
    """Saves the weights of a base, cut.

    Args:
        format: of the base.
        base: its directory.
        out: output directory.
        cut: a name in ``CUTS``, ``"tensor parallel"``, ``"fsdp"`` or ``"fsdp over tensor
            parallel"``.
        most_gathered: number of elements that a tensor which is gathered may have.
        options: of the checkpointer.
        adapter: is merged into the weights, and saved: its tensors, its config, and how these are
            cut, if at all.
        is_async: save in the background.
        leave_out: key of what the state dict does not have.
        range_bytes: what is gathered at a time of a tensor whose rows are not cut.
        arguments: of the save.
    """
    checkpointer: Any = CLASSES[format](base, output_dir=out, **(options or {}))
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
        tensors, config, adapter_cut = adapter
        if adapter_cut is not None:
            tensors = placed(tensors, adapter_cut)
        state |= {"adapter": tensors, "adapter_config": config.to_state()}
        cut_weights = MergedStateDict(cut_weights, tensors, config)
    state |= {"model": cut_weights}
    state.pop(leave_out, None)
    if is_async:
        checkpointer = AsyncCheckpointer(checkpointer)
    with gathering_no_more_than(most_gathered), gathered_in_ranges_of(range_bytes):
        saved = checkpointer.save_checkpoint(state, epoch=0, show_progress=False, **arguments)
        checkpointer.wait()
    return saved


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


def save_with_an_optimizer(base: Path, out: Path, cut: str, is_async: bool = False) -> Path:
    """Saves weights and the state of their optimizer, both cut, with other data beside them.

    Writes what ``torch.save`` makes of the whole state into ``expected.pt`` beside the output
    directory.
    """
    checkpointer: Any = FullModelHFCheckpointer(base, output_dir=out)
    weights = checkpointer.load_checkpoint()["model"]
    weights = by_fsdp(checkpointer, weights) if cut == "fsdp" else placed(weights, cut)
    parameters = [nn.Parameter(one) for one in weights.values()]
    optimizer = torch.optim.AdamW(parameters)
    for one in parameters:
        one.grad = one.detach() * 3
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "nothing": distribute_tensor(torch.ones(0, 3), mesh_of(), [ROWS], src_data_rank=None),
        "short": distribute_tensor(
            torch.arange(33, dtype=torch.bfloat16).reshape(1, 11, 3), mesh_of(), [ROWS]
        ),
        "plain": [torch.arange(5) + dist.get_rank(), (dist.get_rank(), torch.tensor(2.5)), "text"],
        "milestones": Counter({7: 1, 19: 2}),
        # Whose paths are alike.
        "a.b": distribute_tensor(torch.arange(6.0), mesh_of(), [ROWS]),
        "a": {"b": distribute_tensor(torch.arange(4.0), mesh_of(), [ROWS])},
        "steps_run": 7,
    }
    # A gathered tensor may view a larger storage, all of which torch.save would write.
    whole = tree_map_only(DTensor, lambda one: one.full_tensor().clone(), state)
    if dist.get_rank() == 0:
        torch.save(whole, out.with_name("expected.pt"))
    if is_async:
        checkpointer = AsyncCheckpointer(checkpointer)
    most = 0 if cut in ("rows", "fsdp") else 1 << 40
    with gathering_no_more_than(most):
        saved = checkpointer.save_checkpoint(
            {"model": weights, **state}, epoch=0, show_progress=False
        )
        if is_async:
            for one in (*parameters, *_tensors_in(optimizer.state)):
                one.detach().to_local().fill_(-1)
        checkpointer.wait()
    return saved


def save_unlike(
    changes: dict[str, Any], base: Path, out: Path, adapter: tuple[dict[str, Tensor], AdapterConfig]
) -> Path:
    """Saves an adapter in shards and a recipe state with a tensor in shards, changed.

    Args:
        changes: of the adapter's tensors, whole, and of ``optimizer``; ``None`` leaves one out.
        base: directory of the base, of Hugging Face's format.
        out: output directory.
        adapter: its tensors and config.
    """
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    tensors, config = adapter
    more = {key: changes.pop(key) for key in ("odd",) if key in changes}
    optimizer = changes.pop("optimizer", {"exp_avg": torch.ones(7, 3), "exp_avg_sq": torch.ones(7)})
    tensors = {name: one for name, one in (tensors | changes).items() if one is not None}
    state = {
        "adapter": placed(tensors, "rows"),
        "adapter_config": config.to_state(),
        "optimizer": {0: placed(optimizer, "rows")},
        **more,
    }
    return checkpointer.save_checkpoint(state, epoch=0, adapter_only=True, show_progress=False)


def save_while_training(
    base: Path, out: Path, cut: str, adapter: tuple[dict[str, Tensor], AdapterConfig]
) -> tuple[Path, int]:
    """Saves in the background an adapter, merged and alone, while training talks about both.

    Returns:
        The checkpoint, and the number of elements in the buffers of the copies.
    """
    checkpointer: Any = FullModelHFCheckpointer(base, output_dir=out)
    weights = placed(checkpointer.load_checkpoint()["model"], cut)
    tensors, config = placed(adapter[0], cut), adapter[1]
    merged = MergedStateDict(weights, tensors, config)
    saver = AsyncCheckpointer(checkpointer)
    state = {"model": merged, "adapter": tensors, "adapter_config": config.to_state()}
    saver.check_save(state)
    several_steps = threading.Event()
    original = DTensor.full_tensor

    def full_tensor(self: DTensor, **options: Any) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert several_steps.wait(60)
        return original(self, **options)

    DTensor.full_tensor = full_tensor
    try:
        saved = saver.save_checkpoint(state, epoch=0)
        assert not saved.exists()
        for step in range(60):
            for tensor in tensors.values():
                tensor.to_local().fill_(step)
            total = torch.tensor([float(step)])
            dist.all_reduce(total)
            assert total.item() == step * dist.get_world_size()
            for tensor in [*tensors.values()][:6]:
                assert (tensor.full_tensor() == step).all()
            saver.wait(block=False)
            if step == 20:
                several_steps.set()
        saver.wait()
    finally:
        DTensor.full_tensor = original
    return saved, sum(buffer.numel() for buffer in saver._buffers.values())


def fail_in_the_background(room: int | None, base: Path, out: Path) -> list[str]:
    """Saves while no file may become larger than a number of bytes, and then without a limit.

    Returns:
        Of each call what it raises, or that it does not.
    """
    checkpointer: Any = FullModelHFCheckpointer(base, output_dir=out)
    state = {"model": placed(checkpointer.load_checkpoint()["model"], "rows")}
    saver = AsyncCheckpointer(checkpointer)
    saver.check_save(state)
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (old if room is None else room, most))
    answers = []

    def call(function: Callable[..., Any], **options: Any) -> None:
        try:
            function(**options)
            answers.append("well")
        except Exception as error:
            answers.append(type(error).__name__)

    try:
        call(saver.save_checkpoint, state_dict=state, epoch=0)
        deadline = time.monotonic() + 30
        while not saver.running.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        call(saver.wait, block=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))
    call(saver.save_checkpoint, state_dict=state, epoch=1)
    call(saver.save_checkpoint, state_dict=state, epoch=2)
    call(saver.wait)
    return answers


def memory_of_a_save(base: Path, out: Path, cut: str) -> tuple[int, int, int]:
    """Saves a model, an adapter and the state of an optimizer, all cut.

    Returns:
        In bytes: what the process needs at most while it saves beside what it had before; its
        share of all tensors; and the largest tensor.
    """
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    weights = placed(checkpointer.load_checkpoint()["model"], cut)
    states = {
        number: {name: placed({"": torch.rand(one.shape)}, cut)[""] for name in ("m", "v")}
        for number, one in enumerate(weights.values())
    }
    config = AdapterConfig(4, 6, ("q_proj", "w2"))
    adapter = placed(random_adapter(checkpointer.model_config.dims, config), cut)
    state = {
        "model": MergedStateDict(weights, adapter, config),
        "adapter": adapter,
        "adapter_config": config.to_state(),
        "optimizer": states,
    }
    tensors = [*weights.values(), *adapter.values(), *_tensors_in(states)]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what it is now
    before = _peak()
    with gathered_in_ranges_of(2 << 20):
        checkpointer.save_checkpoint(state, epoch=0, show_progress=False)
    share = sum(one.to_local().nbytes for one in tensors)
    return _peak() - before, share, max(one.numel() * one.element_size() for one in tensors)


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def load_state_and_remove(path: Path) -> tuple[tuple[int, ...], Tensor, int]:
    """Loads a recipe state in every process, of which the first then removes the file.

    Returns:
        The shape of the one tensor in it, its last row, and by how many bytes the process grew.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    tensor = load_recipe_state(path)["optimizer"][0]["exp_avg"]
    dist.barrier()
    if dist.get_rank() == 0:
        path.unlink()
    dist.barrier()
    last = tensor[-1].clone()
    return tuple(tensor.shape), last, _peak() - before


def save_low_bit_states(base: Path, out: Path) -> Path:
    """Saves the state of an optimizer of torchao of parameters that FSDP2 has cut."""
    from torchao.optim import AdamW8bit

    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    parameter = nn.Parameter(distribute_tensor(torch.ones(1024, 64), mesh_of(), [ROWS]))
    optimizer = AdamW8bit([parameter])
    parameter.grad = parameter.detach() * 3
    # Compiling the step takes longer than all else here.
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    weights = placed(checkpointer.load_checkpoint()["model"], "rows")
    return checkpointer.save_checkpoint(
        {"model": weights, "optimizer": optimizer.state_dict()}, epoch=0, show_progress=False
    )


def _tensors_in(state: Any) -> list[DTensor]:
    return [one for each in state.values() for one in each.values() if isinstance(one, DTensor)]


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
