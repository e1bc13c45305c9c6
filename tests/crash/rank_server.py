"""Runs jobs of several processes, one of which dies, in forks of a process that has imported all.

Reads one JSON job a line and answers with one line. Run as ``python -m tests.crash.rank_server``.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.export import merged_stream, stream
from checkpointing.storage import (
    digest,
    load,
    new_file,
    tensor_bytes,
    torch_archive,
    writer,
)
from checkpointing.storage.rank_watch import TIMEOUT_VARIABLE
from checkpointing.storage.threads import THREADS_VARIABLE
from checkpointing.training import (
    TransformerDecoder,
    adapter_state_dict,
    add_adapter,
    base_state_dict,
    build_decoder,
)

# Work of one process alone, in which it may raise. What it raises elsewhere it can hardly tell.
_OWN_WORK = (digest, load, new_file, tensor_bytes, torch_archive, writer)
_CONFIG = AdapterConfig(3, 5, ("q_proj", "v_proj", "w2"))


class Broken(Exception):
    """What a process raises that does not die."""


class Dying:
    """Ends the process, stops it or raises when it enters a function.

    Args:
        kind: ``"kill"``, ``"stop"`` or ``"raise"``; ``"count"`` only counts.
        at: number of the function, counted from 1.
    """

    def __init__(self, kind: str, at: int) -> None:
        self._kind = kind
        self._at = at
        self._files = {module.__file__ for module in _OWN_WORK} if kind == "raise" else None
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event not in ("call", "c_call"):
            return
        if self._files is not None and frame.f_code.co_filename not in self._files:
            return
        self.count += 1
        if self.count != self._at:
            return
        if self._kind == "raise":
            raise Broken("in the midst of it")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self._kind])


def save(base: Path, out: Path) -> Callable[[], object]:
    """Saves a model, its adapter and a state of an optimizer, cut by rows and by columns."""
    model = _model(base)
    adapter = adapter_state_dict(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "model": MergedStateDict(base_state_dict(model), adapter, _CONFIG),
        "adapter": adapter,
        "adapter_config": _CONFIG.to_state(),
        "exp_avg": [distribute_tensor(torch.ones(9, 16), mesh, [Shard(dim)]) for dim in (0, 1)],
        "steps_run": 2,
    }
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    return lambda: checkpointer.save_checkpoint(state, epoch=1, show_progress=False)


def load_weights(base: Path, out: Path) -> Callable[[], object]:
    """Loads a checkpoint into a model that is cut."""
    model = _model(base)
    return lambda: FullModelHFCheckpointer(base).load_into(base_state_dict(model))


def stream_weights(base: Path, out: Path) -> Callable[[], object]:
    """Streams a model a little at a time, of which each process keeps nothing."""
    model = _model(base)
    stream._WINDOW = 20_000

    def read() -> None:
        with merged_stream(model) as found:
            for _ in found:
                pass

    return read


OPERATIONS = {"save": save, "load": load_weights, "stream": stream_weights}


def _model(base: Path) -> TransformerDecoder:
    checkpointer = FullModelHFCheckpointer(base)
    weights = checkpointer.load_checkpoint()["model"]
    model = build_decoder(checkpointer.model_config, weights, torch.float32)
    add_adapter(model, _CONFIG)
    with torch.no_grad():
        for tensor in adapter_state_dict(model).values():
            tensor.fill_(0.25)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def serve() -> None:
    """Answers jobs until there are no more."""
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(job: dict[str, Any]) -> list[dict[str, Any] | None]:
    """What became of each process; nothing is known of one that has died, or does not end."""
    place = Path(job["place"])
    place.mkdir()
    children = []
    for rank in range(job["count"]):
        child = os.fork()
        if child == 0:
            _be(rank, job, place)
        children.append(child)
    deadline = time.monotonic() + job["seconds"]
    left = dict(enumerate(children))
    while left and time.monotonic() < deadline:
        for rank, child in list(left.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del left[rank]
        # A process that is stopped waits for nothing but this.
        if set(left) == {job["victim"]} and job["kind"] == "stop":
            break
        time.sleep(0.01)
    for child in left.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    _import_too(place / "modules")
    results = [place / f"{rank}.json" for rank in range(job["count"])]
    return [json.loads(path.read_text()) if path.exists() else None for path in results]


def _import_too(modules: Path) -> None:
    """Imports what a process needed, so that the next one need not."""
    if modules.exists():
        for name in modules.read_text().splitlines():
            if name not in sys.modules and name != "__main__":
                with contextlib.suppress(Exception):
                    __import__(name)


def _be(rank: int, job: dict[str, Any], place: Path) -> None:
    """In the fork: one process of the job."""
    log = os.open(place / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[TIMEOUT_VARIABLE] = str(job["silence"])
    os.environ[THREADS_VARIABLE] = "1"
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place / 'store'}",
            rank=rank,
            world_size=job["count"],
            timeout=timedelta(seconds=job["patience"]),
        )
        act = OPERATIONS[job["operation"]](Path(job["base"]), Path(job["out"]))
        dist.barrier()
        result = _outcome(act, rank == job["victim"], job["kind"], job["at"])
        if rank == 0:
            (place / "modules").write_text("\n".join(sys.modules))
        written = place / f"{rank}.writing"
        written.write_text(json.dumps(result))
        written.rename(place / f"{rank}.json")
        code = 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _outcome(act: Callable[[], object], dies: bool, kind: str, at: int) -> dict[str, Any]:
    dying = Dying(kind, at)
    started = time.monotonic()
    result: dict[str, Any] = {"error": None, "text": ""}
    if dies:
        sys.setprofile(dying)
    try:
        act()
    except BaseException as error:
        result = {"error": type(error).__name__, "text": str(error)}
    finally:
        sys.setprofile(None)
    return result | {"seconds": time.monotonic() - started, "calls": dying.count}


if __name__ == "__main__":
    serve()
