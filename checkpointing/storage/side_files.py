"""The files beside the weights: config, tokenizer, licence."""

import logging
from pathlib import Path, PurePath

from checkpointing.printable import printable
from checkpointing.storage.paths import leads_nowhere_else

logger = logging.getLogger(__name__)

# Weights in any format and their indexes, and what a checkpoint of ours holds for itself.
_WEIGHTS = {
    *(".safetensors", ".bin", ".pt", ".pth", ".distcp"),
    *(".gguf", ".ckpt", ".h5", ".msgpack", ".onnx"),
}
_OWN = {"adapter_config.json", "manifest.json"}
# The base's model card is not true of what was trained from it.
_CARD = "readme.md"


def is_weight_file(path: Path) -> bool:
    """Whether a file may hold weights, as its name tells."""
    return is_weight_name(path.name) and path.is_file()


def is_weight_name(name: str) -> bool:
    """Whether a file of this name may hold weights."""
    return PurePath(name).suffix in _WEIGHTS


def side_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that are no weights, without folders and hidden files.

    A link out of the directory is left out, and said to be: what it leads to may be private, and
    what is beside the weights is copied, and published with them.
    """
    found = [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
        and path.name not in _OWN
        and path.name.lower() != _CARD
    ]
    for path in found:
        if not leads_nowhere_else(path):
            logger.warning("not copied, a link out of its directory: %s", printable(str(path)))
    return [path for path in found if leads_nowhere_else(path)]
