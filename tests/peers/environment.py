"""Makes the environment in which the real torchtune runs, beside the wheel of this checkout."""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("torchtune-requirements.txt")
ENVIRONMENT = ROOT / ".venv-torchtune"
PYTHON = ENVIRONMENT / "bin" / "python"


def build_wheel(directory: Path) -> Path:
    """The wheel of this checkout, built into a directory unless it lies there already."""
    if not list(directory.glob("*.whl")):
        run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--wheel-dir", directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


def torchtune_environment(wheel: Path) -> Path:
    """The python of an environment with torchtune, its requirements and the wheel.

    It is kept from session to session for as long as the versions stay the same, and the wheel in
    it for as long as that does. Sessions that run at the same time wait for each other.
    """
    name = hashlib.sha256(str(ENVIRONMENT).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"torchtune-environment-{name}.lock"):
        _install_torchtune()
        _install_wheel(wheel)
    return PYTHON


def _install_torchtune() -> None:
    constraints = _constraints()
    stamp = f"{sys.version}\n{REQUIREMENTS.read_text()}\n{constraints}"
    file = ENVIRONMENT / "versions.txt"
    if not _says(file, stamp):
        run(sys.executable, "-m", "venv", "--clear", ENVIRONMENT)
        constraints_file = ENVIRONMENT / "constraints.txt"
        constraints_file.write_text(constraints)
        run(PYTHON, "-m", "pip", "install", "-c", constraints_file, "-r", REQUIREMENTS, "torch")
        file.write_text(stamp)


def _install_wheel(wheel: Path) -> None:
    stamp = hashlib.sha256(wheel.read_bytes()).hexdigest()
    file = ENVIRONMENT / "wheel.txt"
    if not _says(file, stamp):
        file.unlink(missing_ok=True)
        run(PYTHON, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel)
        file.write_text(stamp)


def _says(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


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
