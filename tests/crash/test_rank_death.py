"""A process of a job dies, hangs or raises, anywhere in a save, a load or a stream.

The others say so soon, nothing is half there, and the same job works afterwards.
"""

import json
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from checkpointing import FullModelHFCheckpointer
from checkpointing.storage.commit import recover
from checkpointing.verify import verify
from tests.cli.command import ROOT, environment
from tests.crash.contents import hidden
from tests.families.variants import write

# A process that hangs is given up after so many seconds of silence, or if it hangs before it comes
# to the others after so many that they wait; one that lives is never silent so long.
SILENCE, PATIENCE = {"stop": 2.0}, {"stop": 8.0}
# Within so many seconds of the death the others have raised, on a machine that is busy.
BOUND = 20.0
RAISED = {
    "kill": ("RankLostError",),
    "stop": ("RankLostError",),
    "raise": ("CheckpointingError", "RankLostError"),
}
OPERATIONS = ("save", "load", "stream")
KINDS = ("kill", "stop", "raise")


class Server:
    """One fork server, which runs one job at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.rank_server"],
            cwd=ROOT,
            env=environment({"OMP_NUM_THREADS": "1"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, operation, base, out, count, victim=0, kind="count", at=0):
        """What became of each process."""
        self._count += 1
        place = self._directory / f"job_{self._count}"
        job = {
            "operation": operation,
            "base": str(base),
            "out": str(out),
            "count": count,
            "victim": victim,
            "kind": kind,
            "at": at,
            "place": str(place),
            "silence": SILENCE.get(kind, 2 * BOUND),
            "patience": PATIENCE.get(kind, 300),
            "seconds": 2 * BOUND,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        """Ends the server."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    servers = [Server(tmp_path_factory.mktemp("server")) for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    write("llama", directory)
    return directory


@pytest.fixture(scope="module")
def before(base, tmp_path_factory):
    """An output directory with a checkpoint that must outlast all."""
    out = tmp_path_factory.mktemp("before")
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    state = {"model": checkpointer.load_checkpoint()["model"], "steps_run": 1}
    checkpointer.save_checkpoint(state, epoch=0, show_progress=False)
    return out


@pytest.fixture(scope="module")
def calls(servers, base, before, tmp_path_factory):
    """How many functions a process enters: all, or those in which it may raise."""
    known = {}

    def get(server, operation, count, kind):
        counted = "raise" if kind == "raise" else "count"
        if (operation, count, counted) not in known:
            out = tmp_path_factory.mktemp("whole") / "out"
            shutil.copytree(before, out)
            answers = server.run(operation, base, out, count, 1, counted, at=-1)
            assert [one["error"] for one in answers] == [None] * count, answers
            known[operation, count, counted] = answers[1]["calls"]
        return known[operation, count, counted]

    return get


def names_the_rank(text, victim):
    """Or those that have not come, of whom it is one."""
    found = re.search(r"rank (\d+)|one of the ranks ([\d, ]+)", text)
    return found is not None and str(victim) in re.findall(r"\d+", found[0])


def trial(server, base, before, calls, out, operation, kind, number):
    """One death, and what is left of it; returns whether the others noticed."""
    draw = random.Random(f"{operation}, {kind}, {number}")
    count = 2 + number % 2
    victim = draw.randrange(count)
    at = 1 + draw.randrange(int(0.95 * calls(server, operation, count, kind)))
    where = f"{operation}: rank {victim} of {count}: {kind} at {at}"
    shutil.copytree(before, out)
    answers = server.run(operation, base, out, count, victim, kind, at)
    others = [answer for rank, answer in enumerate(answers) if rank != victim]
    assert all(others), f"{where}: a process does not end"
    raised = [answer for answer in others if answer["error"]]
    # It may die after the others have all that they need of it.
    is_done = not raised and kind != "raise"
    for answer in raised:
        # What it raises before it has come to the others they only know from its end.
        assert answer["error"] in RAISED[kind], f"{where}: {answer}"
        assert names_the_rank(answer["text"], victim), f"{where}: {answer}"
    assert is_done or len(raised) == len(others), f"{where}: {answers}"
    if kind == "raise":
        assert answers[victim]["error"] == "Broken", f"{where}: {answers[victim]}"
    slowest = max(answer["seconds"] for answer in others)
    assert slowest < BOUND, where

    # The old checkpoint is as it was, and a new one is there whole or not at all.
    assert verify(out / "epoch_0").problems == (), where
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert names in ({"epoch_0"}, {"epoch_0", "epoch_1"}), where
    if "epoch_1" in names:
        assert operation == "save" and verify(out / "epoch_1").problems == (), where
    if victim != 0 or kind == "raise":
        assert is_done or "epoch_1" not in names, where

    # What is left hidden is that of a dead process, and the same save works afterwards.
    recover(out)
    assert hidden(out) == set(), where
    if operation == "save":
        again = server.run(operation, base, out, count)
        assert [answer["error"] for answer in again] == [None] * count, (where, again)
        assert verify(out / "epoch_1").problems == () and hidden(out) == set(), where
    shutil.rmtree(out)
    return not is_done


def trials(servers, base, before, calls, tmp_path, cases):
    with ThreadPoolExecutor(len(servers)) as pool:
        parts = [cases[number :: len(servers)] for number in range(len(servers))]

        def run(server, part):
            return [
                trial(server, base, before, calls, tmp_path / "-".join(map(str, case)), *case)
                for case in part
            ]

        return [one for some in pool.map(run, servers, parts) for one in some]


def test_the_others_notice_and_nothing_is_half_there(servers, base, before, calls, tmp_path):
    cases = [(*both, number) for both in product(OPERATIONS, KINDS) for number in (1,)]
    noticed = trials(servers, base, before, calls, tmp_path, cases)
    assert len(noticed) == 9 and sum(noticed) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_so_wherever_a_process_dies(servers, base, before, calls, tmp_path, kind):
    numbers = {"save": 34, "load": 13, "stream": 20}
    cases = [(o, kind, number) for o in OPERATIONS for number in range(2, 2 + numbers[o])]
    noticed = trials(servers, base, before, calls, tmp_path, cases)
    assert len(noticed) == 67 and sum(noticed) >= 60
