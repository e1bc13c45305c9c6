"""Starts a recipe in many processes, by torch's own launcher, and tells how they ended."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checkpointing.cli.errors import UsageError
from checkpointing.cli.worker import DIRECTORY, LOG_DIRECTORY, Outcome, log_file, outcomes

# Of torch's launcher, by the names that it has for them.
_OPTIONS: dict[str, dict[str, Any]] = {
    "nproc_per_node": {
        "metavar": "N",
        "help": "processes on this machine: a number, `gpu` (one for each), `cpu` or `auto`",
    },
    "nnodes": {"metavar": "N", "help": "machines; the command is to be run on each of them"},
    "node_rank": {"metavar": "N", "type": int, "help": "number of this machine, from 0"},
    "master_addr": {"metavar": "HOST", "help": "address of machine 0"},
    "master_port": {"metavar": "PORT", "type": int, "help": "a free port of machine 0"},
    "rdzv_backend": {"metavar": "NAME", "help": "how machines find each other, such as c10d"},
    "rdzv_endpoint": {"metavar": "HOST:PORT", "help": "where they do"},
    "rdzv_id": {"metavar": "ID", "help": "name of the job there"},
    "rdzv_conf": {"metavar": "KEY=VALUE,...", "help": "more for the backend"},
    "standalone": {"action": "store_const", "const": True, "help": "this machine is the only one"},
    "max_restarts": {
        "metavar": "N",
        "type": int,
        "help": "times that all processes are started again if one fails; they go on from the "
        "last checkpoint",
    },
    "log_dir": {
        "metavar": "DIR",
        "help": "keep the output of the processes beside the first one, which writes here",
    },
}
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# However long the last save takes: stop_deadline_seconds of the config is the limit.
_NO_LIMIT_SECONDS = 7 * 24 * 3600
_LINES = 30


@dataclass(frozen=True)
class Ending:
    """How a job ended, as far as its processes on this machine tell.

    Attributes:
        code: the exit code: that of the process that decided it, 128 and the number of the signal
            if it was a signal.
        text: what is to be shown; ``None`` if nothing failed.
    """

    code: int
    text: str | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that start a recipe in many processes."""
    group = parser.add_argument_group("many processes, of a recipe for these (before RECIPE)")
    for name, settings in _OPTIONS.items():
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        group.add_argument(*flags, default=None, **settings)


def launch_options(args: argparse.Namespace) -> list[str]:
    """The options that were given, as they are written; none if one process is wanted."""
    given: list[str] = []
    for name in _OPTIONS:
        value = getattr(args, name)
        if value is not None:
            given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return given


def launch(options: Sequence[str], arguments: Sequence[str], debug: bool) -> Ending:
    """Runs a `tune` command in many processes, until all have ended.

    A signal is passed on to all of them, which have the time that they need to end.

    Args:
        options: of the launcher, as :func:`launch_options` gives them.
        arguments: of `tune`, for each process.
        debug: let the launcher say what it does.

    Raises:
        UsageError: if an option is wrong, or the machines do not find each other.
    """
    from torch.distributed import run as torchrun

    command = [*options, "--module", "checkpointing", *arguments]
    parsed = torchrun.get_args_parser().parse_args(command)
    parsed.shutdown_timeout = _NO_LIMIT_SECONDS
    ignored = {each for each in _HANDLED if signal.getsignal(each) == signal.SIG_IGN}
    parsed.signals_to_handle = ",".join(each.name for each in _HANDLED if each not in ignored)
    count = _count(parsed)
    threads = str(max(1, (os.cpu_count() or 1) // count))
    with TemporaryDirectory(prefix="tune-run-") as directory:
        logs = Path(parsed.log_dir or directory).resolve()
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--log_dir {logs}: cannot be made: {error.strerror}") from error
        parsed.log_dir = None
        told = {DIRECTORY: directory, LOG_DIRECTORY: str(logs)}
        if parsed.max_restarts > 0:
            # Else processes that are started again look for each other where the first ones were.
            told["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with _environment({"OMP_NUM_THREADS": threads, **os.environ, **told}), _as_it_was(debug):
            failed, received = _run(parsed)
            return _ending(outcomes(Path(directory)), failed, received)


def _count(parsed: argparse.Namespace) -> int:
    """Processes of this machine."""
    from torch.distributed import run as torchrun

    try:
        torchrun.parse_min_max_nnodes(parsed.nnodes)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--nnodes {parsed.nnodes}: is no number of machines") from error
    try:
        count = torchrun.determine_local_world_size(parsed.nproc_per_node)
    except ValueError as error:
        raise UsageError(
            f"--nproc_per_node {parsed.nproc_per_node}: {error}; give a number, gpu, cpu or auto"
        ) from error
    if count < 1:
        raise UsageError(f"--nproc_per_node {count}: must be at least 1")
    return count


def _run(parsed: argparse.Namespace) -> tuple[dict[int, int], signal.Signals | None]:
    """Runs the processes; exit codes of those that failed by rank, and the signal that was got."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        torchrun.run(parsed)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}, None
    except SignalException as error:
        return {}, signal.Signals(error.sigval)
    except (DistError, RendezvousError) as error:
        raise UsageError(
            f"the machines of the job do not find each other: {error}; check --nnodes, --node_rank "
            "and --master_addr with --master_port, or --rdzv_endpoint, on all of them"
        ) from error
    return {}, None


def _ending(
    told: Sequence[Outcome],
    failed: Mapping[int, int],
    received: signal.Signals | None,
) -> Ending:
    """What decided how a job ended: what the others say of it only repeats that."""
    errors = sorted((each for each in told if each.error), key=lambda each: each.told_at)
    telling = {each.rank for each in errors}
    own = [each for each in errors if not each.is_of_another and each.repeats() not in telling]
    silent = {rank: code for rank, code in failed.items() if rank not in {o.rank for o in told}}
    # A process that has not ended when another one has failed is sent a SIGTERM by the launcher.
    killed = {rank: -code for rank, code in silent.items() if code < 0 and code != -signal.SIGTERM}
    if own:
        return _of_error(own)
    if killed:
        rank, number = next(iter(killed.items()))
        return Ending(128 + number, _of_signal(rank, number))
    if received is not None:
        done = [each.code for each in told]
        return Ending(0 if done and not any(done) else 128 + received)
    for rank, code in silent.items():
        if code > 0:
            return Ending(code, f"error: rank {rank} ended with exit code {code}{_tail(rank)}")
    if errors:
        return _of_error(errors)
    codes = [each.code for each in told if each.code] or [
        abs(code) + 128 for code in silent.values()
    ]
    return Ending(codes[0] if codes else 0)


def _of_error(errors: Sequence[Outcome]) -> Ending:
    first = errors[0]
    rank = min(each.rank for each in errors if each.error == first.error)
    where = f"\n(raised by rank {rank})" if rank > 0 else ""
    return Ending(first.code, f"{first.error}{where}")


def _of_signal(rank: int, number: int) -> str:
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        why = "; the system does so when memory runs out (dmesg tells)"
    else:
        why = _tail(rank)
    return f"error: rank {rank} was ended by {name}, and the job with it{why}"


def _tail(rank: int) -> str:
    """The end of what a process has written, if that was not shown."""
    file = log_file(rank)
    lines = file.read_text(errors="replace").splitlines()[-_LINES:] if file.is_file() else []
    return "\n".join([". The end of its output:", *lines]) if lines else ""


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment that the processes are started in."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _as_it_was(debug: bool) -> Iterator[None]:
    """Keeps torch's launcher silent, and puts back the signal handlers that it replaces."""
    handlers = {each: signal.getsignal(each) for each in _HANDLED}
    level = logging.root.manager.disable
    sys.stdout.flush()
    if not debug:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        for each, handler in handlers.items():
            signal.signal(each, handler)
