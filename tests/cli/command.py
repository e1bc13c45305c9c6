"""Runs the command as a user does, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tune(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m checkpointing``; `env` is added to this process's environment."""
    return subprocess.run(
        [sys.executable, "-m", "checkpointing", *arguments],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with the package importable from any directory."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        **(extra or {}),
    }
