"""Environments of the peers that need other packages than this project."""

import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from tests.peers.environment import ROOT, build_wheel, run, torchtune_environment

_CONSTRAINTS = ROOT / "constraints.txt"
_MERGEKIT = ("mergekit==0.1.5",)
# axolotl pins some sixty packages, most of them for training; these are what merging imports.
_AXOLOTL = (
    "transformers==5.16.1",
    "peft==0.20.0",
    "huggingface_hub==1.17.0",
    "tokenizers==0.23.1",
    "accelerate==1.13.0",
    "pydantic==2.12.5",
    "PyYAML==6.0.3",
    "safetensors",
    "numpy",
    "addict",
    "requests",
    "click",
    "colorama",
)


def torchtune() -> Path:
    """The python of the environment that the tests of parity use."""
    with tempfile.TemporaryDirectory() as directory:
        return torchtune_environment(build_wheel(Path(directory)))


def mergekit() -> Path:
    """The python of an environment with mergekit."""
    return _environment("mergekit", [("-c", str(_CONSTRAINTS), *_MERGEKIT, "torch")])


def axolotl() -> Path:
    """The python of an environment with as much of axolotl as merging needs."""
    return _environment(
        "axolotl", [(*_AXOLOTL, _pinned("torch")), ("--no-deps", "axolotl==0.19.0")]
    )


ENVIRONMENTS = {"torchtune": torchtune, "mergekit": mergekit, "axolotl": axolotl}
JOBS = {name: f"{name}_jobs" for name in ENVIRONMENTS}


def _pinned(package: str) -> str:
    lines = _CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def _environment(name: str, installs: Sequence[Sequence[str]]) -> Path:
    """The python of an environment, which is kept for as long as the versions stay the same."""
    directory = ROOT / f".venv-{name}"
    python, file = directory / "bin" / "python", directory / "versions.txt"
    stamp = f"{sys.version}\n{installs}\n{_CONSTRAINTS.read_text()}"
    key = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"{name}-environment-{key}.lock"):
        if not file.is_file() or file.read_text() != stamp:
            run(sys.executable, "-m", "venv", "--clear", directory)
            for install in installs:
                run(python, "-m", "pip", "install", *install)
            file.write_text(stamp)
    return python
