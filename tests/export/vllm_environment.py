"""Makes the environment in which the real vLLM runs, beside the wheel of this checkout."""

import hashlib
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from tests.peers.environment import ROOT, run

REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")
ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
# vLLM imports them if they are there, and they are built for another torch.
_UNUSABLE = ("torchvision", "torchaudio", "torchcodec")


def vllm_environment(wheel: Path) -> Path:
    """The python of an environment with vLLM and the wheel.

    It is kept from session to session for as long as the versions stay the same, and the wheel in
    it for as long as that does. Sessions that run at the same time wait for each other.
    """
    name = hashlib.sha256(str(ENVIRONMENT).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"vllm-environment-{name}.lock"):
        _install_vllm()
        _install_wheel(wheel)
    return PYTHON


def _install_vllm() -> None:
    stamp = f"{sys.version}\n{REQUIREMENTS.read_text()}"
    file = ENVIRONMENT / "versions.txt"
    if not _says(file, stamp):
        run(sys.executable, "-m", "venv", "--clear", ENVIRONMENT)
        run(PYTHON, "-m", "pip", "install", "-r", REQUIREMENTS)
        run(PYTHON, "-m", "pip", "uninstall", "--yes", *_UNUSABLE)
        file.write_text(stamp)


def _install_wheel(wheel: Path) -> None:
    stamp = hashlib.sha256(wheel.read_bytes()).hexdigest()
    file = ENVIRONMENT / "wheel.txt"
    if not _says(file, stamp):
        file.unlink(missing_ok=True)
        run(PYTHON, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel)
        # What the wheel needs and vLLM has not brought; what vLLM has brought stays.
        run(PYTHON, "-m", "pip", "install", wheel)
        file.write_text(stamp)


def _says(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text
