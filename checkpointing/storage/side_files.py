"""The files beside the weights: config, tokenizer, licence."""

from pathlib import Path

# Weights in any format and their indexes, and what a checkpoint of ours holds for itself.
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx"}
_OWN = {"adapter_config.json", "manifest.json"}
# The base's model card is not true of what was trained from it.
_CARD = "readme.md"


def side_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that are no weights, without folders and hidden files."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
        and path.name not in _OWN
        and path.name.lower() != _CARD
    ]
