"""Measures this project's speed and memory, beside that of others.

    python -m tests.benchmarks [--gb 2.47] [--rounds 5] [--directory DIR] [--only load,save,...]

Prints Markdown tables; what is going on goes to standard error. See docs/performance.md.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from checkpointing.errors import CheckpointingError
from tests.benchmarks.environments import ENVIRONMENTS, JOBS
from tests.benchmarks.groups import GROUPS
from tests.benchmarks.measure import measure
from tests.benchmarks.models import Checkpoints, Size
from tests.benchmarks.processes import JobError
from tests.benchmarks.report import report
from tests.benchmarks.rows import Group


def among(group: Group, sides: set[str]) -> Group:
    """A group without the peers that are not wanted.

    Args:
        group: as it is with all of them.
        sides: names of the modules of jobs that are left out.
    """
    return replace(
        group,
        rows=tuple(
            replace(row, against=tuple(each for each in row.against if not each.sides & sides))
            for row in group.rows
        ),
        memory=tuple(row for row in group.memory if row.task.side not in sides),
    )


def main() -> int:
    """Runs the groups and prints their tables; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.47, help="size of the model in GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=4, help="seconds before each job")
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--only", help=f"some of {','.join(GROUPS)}")
    parser.add_argument(
        "--peers", help=f"some of {','.join(ENVIRONMENTS)}, or nothing; all if left out"
    )
    arguments = parser.parse_args()
    names = list(GROUPS) if arguments.only is None else arguments.only.split(",")
    peers = list(ENVIRONMENTS) if arguments.peers is None else arguments.peers.split(",")
    pythons = {JOBS[peer]: ENVIRONMENTS[peer]() for peer in peers if peer}
    absent = set(JOBS.values()) - pythons.keys()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        checkpoints = Checkpoints(Path(directory), Size.of_gigabytes(arguments.gb))
        print(f"{checkpoints.size}, {checkpoints.size.model_bytes / 1e9:.2f} GB")
        failed = False
        for name in names:
            say(f"== {name}")
            try:
                group = among(GROUPS[name](checkpoints), absent)
                results = measure(
                    group,
                    arguments.rounds,
                    arguments.pause,
                    pythons,
                    checkpoints.out(""),
                    say,
                )
                text = report(group, results)
            except (JobError, CheckpointingError) as error:
                say(str(error))
                text, failed = f"failed: {str(error).strip().splitlines()[-1]}", True
            print(f"\n### {name}\n\n{text}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
