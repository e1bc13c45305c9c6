"""Saving the heat map of an adapter as the kind of file that its name says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.cli.errors import UsageError
from checkpointing.cli.heat_map import arrange, summary
from checkpointing.cli.heat_map_html import page
from checkpointing.cli.heat_map_png import check_matplotlib, image
from checkpointing.printable import printable

_ADVICE = "give the path of a new file, such as updates.png"


def check_file(file: Path) -> None:
    """Checks that a picture can be saved there, before anything is computed for it.

    An older picture may be replaced, a file of a checkpoint may not.

    Raises:
        UsageError: if it is neither a .png nor a .html file, if its directory does not exist, if a
            checkpoint's file is in its place, or if matplotlib is needed and not installed.
    """
    suffix = file.suffix.lower()
    if suffix not in (".png", ".html"):
        raise UsageError(f"{file}: a heat map is saved as .png or .html; end the name in either")
    if not file.parent.is_dir():
        raise UsageError(f"{file.parent}: no such directory; make it, or correct the path")
    if file.is_dir():
        raise UsageError(f"{file}: is a directory; {_ADVICE}")
    if file.exists() and any(map(_holds_checkpoint, (file.parent, file.resolve().parent))):
        raise UsageError(f"{file}: is in the directory of a checkpoint, and is there; {_ADVICE}")
    if suffix == ".png":
        check_matplotlib()


def _holds_checkpoint(directory: Path) -> bool:
    from checkpointing.adapter_checkpoint import has_adapter
    from checkpointing.formats.hf_config import CONFIG_NAME
    from checkpointing.formats.meta import PARAMS_NAME
    from checkpointing.storage.manifest import MANIFEST_NAME

    names = (MANIFEST_NAME, CONFIG_NAME, PARAMS_NAME)
    return has_adapter(directory) or any((directory / name).is_file() for name in names)


def save(file: Path, facts: Mapping[str, Any]) -> None:
    """Saves the heat map of an inspected adapter.

    Args:
        file: one that :func:`check_file` has passed.
        facts: of :func:`checkpointing.describe.describe`.

    Raises:
        UsageError: if there is nothing to show, or if the file cannot be written.
    """
    path, adapter = facts["path"], facts["adapter"]
    if adapter is None:
        raise UsageError(
            f"{path}: there is no heat map of it, since it holds no adapter; give a checkpoint of "
            "an adapter run, or a PEFT adapter"
        )
    if not adapter["relative_updates"]:
        where = "is not known" if adapter["base"] is None else f"is not at {adapter['base']}"
        raise UsageError(
            f"{path}: there is no heat map of it, since the update is measured against the "
            f"weights of the adapter's base, which {where}; give its directory with --base"
        )
    heat_map = arrange(adapter["relative_updates"])
    if file.suffix.lower() == ".png":
        content = image(heat_map, printable(path), summary(adapter))
    else:
        content = page(heat_map, printable(path), summary(adapter)).encode()
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written ({error.strerror}); {_ADVICE}") from error
