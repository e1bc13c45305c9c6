"""Which format a directory's model is in, told by its files and the names of its tensors."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import CheckpointNotFoundError
from checkpointing.formats.base import Format, OpenModel
from checkpointing.formats.hf import HFFormat
from checkpointing.formats.megatron import MegatronFormat
from checkpointing.formats.megatron_files import TRACKER_NAME
from checkpointing.formats.meta import MetaFormat
from checkpointing.formats.tune import TuneFormat
from checkpointing.storage.read import open_tensor_file

FORMATS: dict[str, Format] = {
    "hf": HFFormat(),
    "meta": MetaFormat(),
    "megatron": MegatronFormat(),
    "tune": TuneFormat(),
}
"""By the names that commands take."""

_NAMES = {
    "tune": re.compile(r"(decoder\.)?layers\.\d+\.(attn|sa_norm)\."),
    "meta": re.compile(r"layers\.\d+\.(attention|feed_forward|attention_norm)\."),
    "hf": re.compile(r"(.*\.)?(layers\.\d+\.self_attn|block\.\d+\.layer\.0\.SelfAttention)\."),
}

# What transformers' Trainer leaves beside weights or an adapter.
_TRAINER_FILES = {"training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"}


@dataclass(frozen=True)
class FoundModel:
    """A model on disk whose format is known and of which nothing has been checked yet.

    Attributes:
        directory: where it lies.
        format: its format.
        files: its weight files.
    """

    directory: Path
    format: Format
    files: tuple[Path, ...]

    @property
    def config_file(self) -> Path | None:
        """The config file that counts, ``None`` if native weights lie without one."""
        for name in self.format.config_names:
            if (self.directory / name).is_file():
                return self.directory / name
        return None

    def open(self, model_type: str | None = None) -> OpenModel:
        """Reads the headers and checks them.

        Args:
            model_type: torchtune's ModelType name or a family's; needed where no config file
                names the family.

        Raises:
            CheckpointingError: if a file is damaged, or does not fit the config.
        """
        return self.format.open(self.directory, self.files, model_type)


def find_model(directory: Path) -> FoundModel:
    """Recognises the model in a directory.

    Raises:
        CheckpointNotFoundError: if there is no directory, or no model in it.
        CorruptCheckpointError: if a weight file cannot be read.
    """
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory}: no such directory; correct the path")
    for name in FORMATS:
        try:
            files = FORMATS[name].find_files(directory, None)
        except CheckpointNotFoundError:
            if _names_files(directory, name):
                raise
            continue
        if name == "megatron":
            return FoundModel(directory, FORMATS[name], tuple(files))
        files = [path for path in files if path.name not in _TRAINER_FILES]
        if not files:
            continue
        # File names mislead: torchtune writes its own layout as model-00001-of-00001.bin too.
        by_names = _format_of(files) or name
        return FoundModel(directory, FORMATS[by_names], tuple(files))
    raise CheckpointNotFoundError(f"{directory}: holds no model{_what_it_holds(directory)}")


def _names_files(directory: Path, format: str) -> bool:
    """Whether a file says that there are files of a format."""
    if format == "hf":
        return any(directory.glob("*.index.json"))
    return format == "megatron" and (directory / TRACKER_NAME).is_file()


def _format_of(files: Iterable[Path]) -> str | None:
    for file in files:
        for tensor in open_tensor_file(file).metas:
            for format, pattern in _NAMES.items():
                if pattern.match(tensor):
                    return format
    return None


def _what_it_holds(directory: Path) -> str:
    merged = directory / "merged"
    if any(directory.glob("adapter_model.*")):
        return (
            f" but an adapter; its merged model is in {merged}"
            if merged.is_dir()
            else " but an adapter; merge it with `tune merge`"
        )
    inner = [
        path.name
        for path in sorted(directory.iterdir())
        if (path / "manifest.json").exists() and not path.name.startswith(".")
    ]
    if inner:
        return f" itself, but checkpoints: {', '.join(inner)}; name one of them"
    return (
        " (model.safetensors, pytorch_model.bin or their indexes, consolidated.NN.pth, "
        f"{TRACKER_NAME}, or native weights); correct the path"
    )
