"""Makes the environment in which the real torchtune runs, beside the wheel of this checkout."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("torchtune-requirements.txt")
ENVIRONMENT = ROOT / ".venv-torchtune"
STAMP = ENVIRONMENT / "stamp.txt"


def build_wheel(directory: Path) -> Path:
    """The wheel of this checkout, built into a directory unless it lies there already."""
    if not list(directory.glob("*.whl")):
        run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--wheel-dir", directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


def torchtune_environment(wheel: Path) -> Path:
    """The python of an environment with torchtune, its requirements and the wheel.

    It is kept from session to session for as long as the versions stay the same; the wheel is
    installed anew every time.
    """
    python = ENVIRONMENT / "bin" / "python"
    constraints = _constraints()
    stamp = f"{sys.version}\n{REQUIREMENTS.read_text()}\n{constraints}"
    if not STAMP.is_file() or STAMP.read_text() != stamp:
        run(sys.executable, "-m", "venv", "--clear", ENVIRONMENT)
        file = ENVIRONMENT / "constraints.txt"
        file.write_text(constraints)
        run(python, "-m", "pip", "install", "-c", file, "-r", REQUIREMENTS, "torch")
        STAMP.write_text(stamp)
    run(python, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel)
    return python


def _constraints() -> str:
    """The project's constraints without torchao, of which torchtune 0.6.1 needs an older one."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("torchao=="))


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command and returns what it printed; the error of a failure holds its output."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout
