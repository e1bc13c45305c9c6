"""Show what a checkpoint holds: format, family, sizes, and its adapter.

For an adapter whose base is at hand, a picture shows how much it changes each weight: ‖U‖/‖W‖,
rows are modules, columns are layers.

examples:
  tune inspect out/smollm2_135M_lora/epoch_0
  tune inspect Llama-3.2-1B/original --model-type LLAMA3_2 --json
"""

import argparse
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.cli.text import count_text, size_text

_SHADES = " ░▒▓█"
_SHOWN_FILES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune inspect`."""
    parser.add_argument("path", metavar="PATH", type=Path, help="directory of a checkpoint")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument(
        "--base", metavar="DIR", type=Path, help="the adapter's base, if it has been moved"
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="such as LLAMA3_2 or mistral, where no config file names the family",
    )


def execute(args: argparse.Namespace) -> int:
    """Prints the facts."""
    from checkpointing.describe import describe

    facts = describe(args.path, args.model_type, args.base)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    lines = [f"{args.path}"]
    if facts["model"] is not None:
        lines += ["model", *_lines(_model(facts["model"]))]
    if facts["adapter"] is not None:
        lines += ["adapter", *_lines(_adapter(facts["adapter"]))]
    if facts["checkpoint"]:
        lines += ["checkpoint", *_lines(_checkpoint(facts["checkpoint"]))]
    updates = (facts["adapter"] or {}).get("relative_updates")
    if updates:
        lines += heat_map(updates)
    print("\n".join(lines))
    return 0


def _lines(rows: Mapping[str, Any]) -> list[str]:
    shown = {key: value for key, value in rows.items() if value not in (None, "", {}, [])}
    width = max(map(len, shown))
    return [f"  {key:{width}}  {value}" for key, value in shown.items()]


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    dims, config = model.get("dims", {}), model.get("config", {})
    files = model["files"]
    names = ", ".join(list(files)[:_SHOWN_FILES]) + (", ..." if len(files) > _SHOWN_FILES else "")
    rest = [
        f"{key} {value}"
        for key, value in config.items()
        if value is not None and value != [] and value != ()
    ]
    tied = {None: None, True: "yes", False: "no"}[dims.get("tied")]
    return {
        "format": model["format"],
        "family": model["family"] or "unknown",
        "problem": model["problem"],
        "sizes": ", ".join(f"{key} {dims[key]}" for key in dims if type(dims[key]) is int),
        "biases": ", ".join(key for key in dims if dims[key] is True and key != "tied"),
        "tied": tied,
        "config": ", ".join(rest),
        **_amount(model),
        "files": f"{len(files)} ({names}), {size_text(sum(files.values()))}",
    }


def _amount(counted: Mapping[str, Any]) -> dict[str, Any]:
    dtypes = counted["bytes_by_dtype"]
    return {
        "tensors": f"{count_text(counted['tensors'], 'tensor')}, "
        f"{counted['parameters']:,} parameters, {size_text(counted['bytes'])}",
        "dtypes": ", ".join(f"{dtype} ({size_text(size)})" for dtype, size in dtypes.items()),
    }


def _adapter(adapter: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": adapter["kind"],
        "rank": adapter["rank"],
        "alpha": f"{adapter['alpha']:g}",
        "scale": f"{adapter['scale']:g}",
        "targets": ", ".join(adapter["targets"]),
        "other ranks": _pattern(adapter["rank_pattern"]),
        "other alphas": _pattern(adapter["alpha_pattern"]),
        "dropout": f"{adapter['dropout']:g}",
        **_amount(adapter),
        "base": adapter["base"]
        and adapter["base"]
        + ("" if adapter["relative_updates"] else " (not there; give it with --base)"),
    }


def _pattern(pattern: Mapping[str, float]) -> str:
    return ", ".join(f"{module} {value:g}" for module, value in pattern.items())


def _checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    source = checkpoint.get("converted_from", {})
    return {
        "step": checkpoint.get("step"),
        "epoch": checkpoint.get("epoch"),
        "made from": source and f"{source.get('directory')} ({source.get('format')})",
        "merged with": checkpoint.get("merged_adapter"),
    }


def heat_map(updates: Mapping[str, float]) -> list[str]:
    """Lines of shaded blocks: a row for each kind of module, a column for each layer.

    Args:
        updates: ``‖U‖ / ‖W‖`` by native module name.
    """
    kinds: dict[str, dict[int, float]] = {}
    others: dict[str, float] = {}
    for module, value in updates.items():
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
        if match is None:
            others[module] = value
        else:
            kinds.setdefault(match[2], {})[int(match[1])] = value
    layers = max((layer + 1 for row in kinds.values() for layer in row), default=1)
    largest = max(filter(math.isfinite, updates.values()), default=0.0)
    width = max(map(len, (*kinds, *others)))
    lines = [
        f"‖U‖/‖W‖ by layer, 0 to {layers - 1}: {_SHADES[-1]} is the largest, {largest:.2e}; "
        "· is without an adapter"
    ]
    for kind, row in kinds.items():
        blocks = "".join(_shade(row.get(layer), largest) for layer in range(layers))
        low, high = min(row.values()), max(row.values())
        numbers = f"{low:.2e}" if low == high else f"{low:.2e} to {high:.2e}"
        lines.append(f"  {kind:{width}}  |{blocks}|  {numbers}")
    for module, value in others.items():
        block = _shade(value, largest).ljust(layers)
        lines.append(f"  {module:{width}}  |{block}|  {value:.2e}")
    return lines


def _shade(value: float | None, largest: float) -> str:
    if value is None:
        return "·"
    if not math.isfinite(value):
        return "!"
    if value == 0 or largest == 0:
        return _SHADES[0]
    return _SHADES[math.ceil((len(_SHADES) - 1) * value / largest)]
