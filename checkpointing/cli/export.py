"""Give an adapter to a running server of vLLM or SGLang, or write what engines load.

With --to vllm, sglang or server (which asks the server what it is), the adapter is written where
the server sees it, loaded by it, and listed by it; then the older versions of the same --name are
unloaded. It has another name for every content, since servers keep what they computed by the name
of the adapter. What to give as `model` in requests is printed.

With --to dir, a directory is written: with an adapter the adapter alone, as engines load it; with
--merged the whole model with the adapter folded in; without an adapter the model. It is what
`tune convert` and `tune merge` write. A running server does not take merged weights: write them,
and start it on the directory.

MODEL is the base of ADAPTER, in any format. Of a checkpoint with an adapter, given alone, the base
is where the checkpoint says. All may be URLs, such as s3://bucket/run/epoch_0.

examples:
  tune export out/lora/epoch_0 --to server --url http://localhost:8000
  tune export Llama-3.2-1B peft-adapter --to sglang --url http://gpu:30000 --adapter-dir /shared
  tune export out/lora/epoch_0 --to dir --out served/adapter
  tune export out/lora/epoch_0 --to dir --out served/model --merged
"""

import argparse
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.cli import convert, merge
from checkpointing.cli.errors import UsageError
from checkpointing.cli.text import count_text, size_text
from checkpointing.printable import printable
from checkpointing.storage.location import is_remote, path_or_url

if TYPE_CHECKING:
    from checkpointing.export import WeightStream
    from checkpointing.export.engines.server_engine import ServerEngine

API_KEY_VARIABLE = "TUNE_API_KEY"
_SERVERS = ("server", "vllm", "sglang")
_FOR_DIRECTORIES = ("out", "merged", "overwrite", "model_type")
_FOR_SERVERS = ("url", "name", "adapter_dir", "server_dir", "served_model", "api_key")
# Every vocabulary has them.
_PROBE = [1, 2, 3, 4, 5, 6, 7, 8]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune export`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=path_or_url,
        help="directory of a model, or a checkpoint with an adapter, such as epoch_0 of a run",
    )
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        nargs="?",
        type=path_or_url,
        help="checkpoint with an adapter, or a PEFT adapter, whose base is MODEL",
    )
    parser.add_argument(
        "--to",
        choices=(*_SERVERS, "dir"),
        required=True,
        help="a running server, or a directory",
    )
    directory = parser.add_argument_group("for --to dir")
    directory.add_argument(
        "--out", metavar="DIR", type=path_or_url, help="directory to write, or its URL"
    )
    directory.add_argument(
        "--merged", action="store_true", help="the whole model rather than the adapter"
    )
    convert.add_common_arguments(parser)
    server = parser.add_argument_group("for --to server, vllm and sglang")
    server.add_argument("--url", metavar="URL", help="of the server, such as http://localhost:8000")
    server.add_argument(
        "--name",
        metavar="NAME",
        help="what the adapter's name begins with; that of the run's directory if left out",
    )
    server.add_argument(
        "--adapter-dir",
        metavar="DIR",
        type=Path,
        help="where the adapter is written, which the server must see too and needs for as long "
        "as it serves it; in tune's cache if left out",
    )
    server.add_argument(
        "--server-dir",
        metavar="DIR",
        type=Path,
        help="the same directory as the server sees it, if that is by another path",
    )
    server.add_argument("--served-model", metavar="NAME", help="base on the server; its first")
    server.add_argument(
        "--api-key", metavar="KEY", help=f"of the server; ${API_KEY_VARIABLE} if left out"
    )


def execute(args: argparse.Namespace) -> int:
    """Pushes the adapter and prints what it is called, or writes the directory."""
    _check_arguments(args)
    if args.to != "dir":
        return _to_server(args)
    base, adapter = _base_and_adapter(args)
    if adapter is not None and not args.merged:
        return _write_adapter(args, base, adapter)
    own = {"to": "hf", "model_type": args.model_type, "overwrite": args.overwrite}
    own["max_shard_size"] = args.max_shard_size
    if adapter is not None:
        return merge.execute(
            Namespace(base=base, adapter=adapter, out=args.out, original_base=False, **own)
        )
    own |= {"base": None, "adapter_form": None, "dry_run": False}
    return convert.execute(Namespace(source=base, destination=args.out, **own))


def _check_arguments(args: argparse.Namespace) -> None:
    needed, others = ("out", _FOR_SERVERS) if args.to == "dir" else ("url", _FOR_DIRECTORIES)
    if getattr(args, needed) is None:
        such = "out/served" if needed == "out" else "http://localhost:8000"
        raise UsageError(f"--to {args.to} needs --{needed}, such as {such}")
    if args.merged and args.to != "dir":
        raise UsageError(
            "a running server takes an adapter and no merged weights; write these with --to dir "
            "--merged --out DIR, and start the server on DIR"
        )
    given = [name for name in others if getattr(args, name)]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags}: not for --to {args.to}; leave it out")


def _base_and_adapter(args: argparse.Namespace) -> tuple[Path | str, Path | str | None]:
    from checkpointing.adapter_checkpoint import open_adapter
    from checkpointing.convert_adapter import is_adapter
    from checkpointing.storage.mirror import local

    if args.adapter is not None:
        return args.model, args.adapter
    here = local(args.model)
    if not is_adapter(here):
        return args.model, None
    base = open_adapter(here).base_directory
    if base is None or not base.is_dir():
        told = "does not say which it is" if base is None else f"says {base}, which is not here"
        raise UsageError(
            f"{args.model}: its base is needed, and it {told}; give the base's directory before "
            f"it: tune export BASE {args.model} --to {args.to} ..."
        )
    return base, args.model


def _write_adapter(args: argparse.Namespace, base: Path | str, adapter: Path | str) -> int:
    from checkpointing.convert import check_destination
    from checkpointing.convert_adapter import plan_adapter_conversion, write_adapter
    from checkpointing.export.directory import check_servable

    check_destination(args.out, (adapter, base), args.overwrite)
    plan = plan_adapter_conversion(adapter, "peft", base, model_type=args.model_type)
    assert plan.peft is not None  # it is what was asked for
    check_servable(plan.peft.config)
    for note in plan.notes:
        print(f"note: {printable(note)}")
    write_adapter(plan, args.out, args.overwrite)
    print(f"wrote {args.out} (adapter of rank {plan.peft.config['r']}, {size_text(plan.nbytes)})")
    return 0


def _to_server(args: argparse.Namespace) -> int:
    base, adapter = _base_and_adapter(args)
    if adapter is None:
        raise UsageError(
            f"{args.model}: holds no adapter, and a running server takes nothing else; write the "
            "model with --to dir --out DIR, and start the server on DIR"
        )
    from checkpointing.export import adapter_stream
    from checkpointing.export.engines.server_engine import ServerEngine
    from checkpointing.storage.cache import cache_dir

    stream = adapter_stream(adapter, base)
    engine = ServerEngine(
        args.url,
        None if args.to == "server" else args.to,
        args.served_model,
        args.adapter_dir or cache_dir() / "served",
        name=args.name or _name_of(args.adapter or args.model),
        server_directory=args.server_dir,
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE),
    )
    _print_plan(stream, engine)
    before = engine.logprobs([_PROBE])
    engine.load_adapter(stream)
    _print_result(engine, before[0].equal(engine.logprobs([_PROBE])[0]))
    return 0


def _name_of(adapter: Path | str) -> str:
    """Of a run's checkpoints all the same, so that a later one takes the place of an earlier."""
    path = Path(str(adapter).partition("://")[2]) if is_remote(adapter) else Path(adapter).resolve()
    if path.suffix in (".pt", ".bin", ".safetensors"):
        path = path.parent
    if re.fullmatch(r"(epoch|step)_\d+", path.name):
        path = path.parent
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._") or "adapter"


def _print_plan(stream: "WeightStream", engine: "ServerEngine") -> None:
    config = stream.adapter_config or {}
    print(
        f"adapter of rank {config.get('r')}, {count_text(len(stream.metas), 'tensor')}, "
        f"{size_text(stream.nbytes)}, to {engine.name}"
    )
    told = config.get("base_model_name_or_path")
    served = engine.base_root or engine.base
    if told != served and not _same_directory(told, served):
        print(
            f"note: the server serves {printable(served)}, and the adapter's base is "
            f"{printable(str(told))}: see that they are the same weights"
        )
    for note in stream.notes:
        print(f"note: {printable(note)}")


def _same_directory(one: object, other: str) -> bool:
    return Path(str(one)).is_dir() and Path(str(one)).resolve() == Path(other).resolve()


def _print_result(engine: "ServerEngine", computes_the_same: bool) -> None:
    for name in engine.replaced:
        print(f"unloaded {name}")
    print(f'served, in requests: "model": "{printable(engine.request_model)}"')
    if computes_the_same:
        print(
            "warning: for a few tokens the server computes the same as without the adapter; is it "
            "trained, and does the server name the adapter's modules as transformers does?",
            file=sys.stderr,
        )
