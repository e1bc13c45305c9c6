"""Show what a checkpoint holds: format, family, sizes, and its adapter.

For an adapter whose base is at hand, a picture shows how much it changes each weight: ‖U‖/‖W‖,
rows are modules, columns are layers. --heat-map saves it as a picture or a web page.

examples:
  tune inspect out/smollm2_135M_lora/epoch_0
  tune inspect out/smollm2_135M_lora/epoch_0 --heat-map updates.png
  tune inspect Llama-3.2-1B/original --model-type LLAMA3_2 --json
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.cli.heat_map import arrange, as_text
from checkpointing.cli.heat_map_file import check_file, save
from checkpointing.cli.text import count_text, size_text
from checkpointing.printable import printable
from checkpointing.storage.location import path_or_url

_SHOWN_FILES = 4
_WIDE = 10_000  # A file or a pipe has lines of any width.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune inspect`."""
    parser.add_argument("path", metavar="PATH", type=path_or_url, help="directory of a checkpoint")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument(
        "--base", metavar="DIR", type=path_or_url, help="the adapter's base, if it has been moved"
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="such as LLAMA3_2 or mistral, where no config file names the family",
    )
    parser.add_argument(
        "--heat-map",
        metavar="FILE",
        type=Path,
        help="save the picture of the adapter as a .png or .html file",
    )


def execute(args: argparse.Namespace) -> int:
    """Prints the facts, and saves the picture if it is wanted."""
    from checkpointing.describe import describe

    if args.heat_map is not None:
        check_file(args.heat_map)
    facts = describe(args.path, args.model_type, args.base)
    if args.heat_map is not None:
        save(args.heat_map, facts)
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
        columns = shutil.get_terminal_size(fallback=(_WIDE, 0)).columns
        lines += as_text(arrange(updates), columns)
    if args.heat_map is not None:
        lines.append(f"wrote {args.heat_map}")
    print("\n".join(lines))
    return 0


def _lines(rows: Mapping[str, Any]) -> list[str]:
    shown = {
        # Only an error has several lines.
        key: value if key == "problem" else printable(str(value))
        for key, value in rows.items()
        if value not in (None, "", {}, [])
    }
    width = max(map(len, shown))
    return [f"  {key:{width}}  {value}" for key, value in shown.items()]


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    dims, config = model.get("dims", {}), model.get("config", {})
    files = model["files"]
    names = ", ".join(list(files)[:_SHOWN_FILES]) + (", ..." if len(files) > _SHOWN_FILES else "")
    rest = [
        f"{key} {value}" for key, value in config.items() if value not in (None, False, 0, [], ())
    ]
    tied = {None: None, True: "yes", False: "no"}[dims.get("tied")]
    return {
        "format": model["format"],
        "family": model["family"] or "unknown",
        "problem": model["problem"],
        # What a model has none of is left out.
        "sizes": ", ".join(
            f"{key} {dims[key]}" for key in dims if type(dims[key]) is int and dims[key]
        ),
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
        "trained whole": ", ".join(adapter["modules_to_save"]),
        "bias of B": "yes" if adapter["lora_bias"] else "",
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
    source = checkpoint.get("converted_from")
    source = source if isinstance(source, Mapping) else None
    return {
        "step": checkpoint.get("step"),
        "epoch": checkpoint.get("epoch"),
        "made from": source and f"{source.get('directory')} ({source.get('format')})",
        "merged with": checkpoint.get("merged_adapter"),
    }
