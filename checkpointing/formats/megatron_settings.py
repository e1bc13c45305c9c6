"""Megatron-Bridge's ``run_config.yaml``, in the directory of an iteration or in that around it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import CorruptCheckpointError
from checkpointing.storage.paths import refuse_link_outside

SETTINGS_NAME = "run_config.yaml"
_MOST_BYTES = 16 << 20


def run_settings(section: str, *directories: Path) -> Mapping[str, Any]:
    """A section of the settings of a run; empty if they are not there, or lack it.

    Args:
        section: such as ``model`` or ``peft``.
        directories: where to look, in this order.

    Raises:
        CorruptCheckpointError: if the file is not YAML.
        UnsafePathError: if it is a link to a file elsewhere.
    """
    for directory in directories:
        path = directory / SETTINGS_NAME
        if path.is_file():
            found = _read(path).get(section)
            return found if isinstance(found, Mapping) else {}
    return {}


def _read(path: Path) -> Mapping[str, Any]:
    # Imported here: few checkpoints have such a file.
    import yaml

    refuse_link_outside(path)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("far larger than any of its kind")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not valid YAML ({error}); get it anew") from error
    return content if isinstance(content, Mapping) else {}
