"""What lies in an output directory."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.training.runs import metrics

Content = dict[str, Any]
# Ours, and no leftover.
_KEPT_HIDDEN = {".run.lock"}


def contents(out: Path) -> dict[str, Content]:
    """What lies in each directory that has a final name, and is no log."""
    return {
        path.name: content(path)
        for path in sorted(out.iterdir())
        if path.is_dir() and not path.name.startswith(".") and path.name != "logs"
    }


def content(directory: Path) -> Content:
    """A hash of each file; the manifest without what differs between two runs."""
    found: Content = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    if "manifest.json" in found:
        manifest = json.loads((directory / "manifest.json").read_text())
        for differs in ("run_id", "saved_at_ns"):
            manifest.pop(differs, None)
        manifest.get("metrics", {}).pop("tokens_per_second", None)
        found["manifest.json"] = manifest
    return found


def hidden(out: Path) -> set[str]:
    """Names of what was left over."""
    names = {path.name for path in out.rglob(".*")}
    return names - _KEPT_HIDDEN


def losses(out: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, or none for a command that does not train."""
    return metrics(out) if (out / "logs" / "metrics.jsonl").exists() else {}


def logged_steps(out: Path) -> list[int]:
    """Steps as they were logged, by all runs."""
    file = out / "logs" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]
