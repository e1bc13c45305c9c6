"""The groups of rows, by the name that ``--only`` takes."""

from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from checkpointing import FullModelHFCheckpointer
from tests.benchmarks.durable import files_of
from tests.benchmarks.models import Checkpoints
from tests.benchmarks.processes import Processes
from tests.benchmarks.rows import (
    Against,
    Check,
    Figure,
    Group,
    Growth,
    Limited,
    MemoryRow,
    Row,
    Task,
    task,
)

_MIB = 1 << 20
_SAVE_MEMORY = 64 * _MIB
_MEMORY_LIMIT = 512 * _MIB
_EXPORTS = 5


def load(c: Checkpoints) -> Group:
    """From the page cache, and how much memory it takes."""
    ours = task("ours", "load", base=c.base)
    theirs = task("torchtune_jobs", "load", base=c.base, out=c.out("torchtune"))
    model = c.size.model_bytes
    memory = [MemoryRow("load", ours, 0.07 * model), MemoryRow("load, torchtune", theirs)]
    # It is measured from the day that the checkpointers have it.
    if hasattr(FullModelHFCheckpointer, "load_into"):
        into = task("ours", "load_into", base=c.base)
        memory.append(MemoryRow("load into live parameters", into, 0.005 * model))
    return Group(
        rows=(Row("load, warm", Figure(ours), (_against("torchtune", theirs, 1 / 0.33),)),),
        memory=tuple(memory),
    )


def cold(c: Checkpoints) -> Group:
    """From the disk."""
    reads = [
        task("raw_jobs", "read", directory=c.base, threads=threads, block=block, cold=True)
        for threads, block in ((1, 8), (2, 4), (2, 8), (2, 16), (4, 8))
    ]
    ours = task("ours", "load", base=c.base, cold=True)
    return Group(rows=(Row("load, cold", Figure(ours), (_against("raw read", reads, 0.85),)),))


def save(c: Checkpoints) -> Group:
    """To the disk, as transformers reads it."""
    ours = task("ours", "save", base=c.base, out=c.out("ours"))
    unhashed = task("ours", "save", base=c.base, out=c.out("unhashed"), checksums=False)
    merged = task("ours", "save", base=c.base, out=c.out("merged"), adapter=c.adapter)
    torchtune = task("torchtune_jobs", "save", base=c.base, out=c.out("torchtune"))
    safetensors = task("torch_jobs", "save_safetensors", base=c.base, out=c.out("safetensors"))
    dcp = task("torch_jobs", "save_dcp", base=c.base, out=c.out("dcp"))
    against = (
        _against("raw write", _writes(c), 0.9),
        _against("torchtune", torchtune, 8),
        _against("safetensors", safetensors, 3),
        _against("DCP", dcp, 3),
        _against("without checksums", unhashed, 1 / 1.05),
    )
    return Group(
        rows=(
            Row("save HF", Figure(ours), against),
            Row("save HF of an adapter run", Figure(merged)),
        ),
        memory=(
            MemoryRow("save HF", ours, _SAVE_MEMORY),
            MemoryRow("save HF of an adapter run", merged, _SAVE_MEMORY),
            MemoryRow("save HF, torchtune", torchtune),
            MemoryRow("save HF, safetensors", safetensors),
            MemoryRow("save HF, DCP", dcp),
        ),
    )


def _writes(c: Checkpoints) -> list[Task]:
    return [
        task(
            "raw_jobs",
            "write",
            directory=c.base,
            out=c.out("raw"),
            threads=threads,
            windows=windows,
        )
        for threads, windows in ((2, True), (1, True), (2, False), (1, False))
    ]


def save_others(c: Checkpoints) -> Group:
    """To the disk, in Meta's and torchtune's formats."""
    rows, memory = [], []
    for format, base, target in (("meta", c.meta, 6), ("tune", c.tune, None)):
        ours = task("ours", "save", base=base, out=c.out("ours"), format=format)
        out = c.out("torchtune")
        theirs = task("torchtune_jobs", "save", base=base, out=out, format=format)
        rows.append(Row(f"save {format}", Figure(ours), (_against("torchtune", theirs, target),)))
        memory.append(MemoryRow(f"save {format}", ours, _SAVE_MEMORY))
        memory.append(MemoryRow(f"save {format}, torchtune", theirs))
    return Group(rows=tuple(rows), memory=tuple(memory))


def merge(c: Checkpoints) -> Group:
    """An adapter into its base, from directory to directory."""
    ours = task("ours", "merge", base=c.base, adapter=c.adapter, out=c.out("ours"))
    peft = task("peft_jobs", "merge", base=c.base, adapter=c.adapter, out=c.out("peft"))
    out = c.out("torchtune")
    torchtune = task("torchtune_jobs", "merge", base=c.base, adapter=c.native_adapter, out=out)
    others = {
        name: task(f"{name}_jobs", "merge", base=c.base, adapter=c.adapter, out=c.out(name))
        for name in ("axolotl", "mergekit")
    }
    against = (
        _against("PEFT", peft, 10),
        _against("torchtune", torchtune, 6),
        *(_against(name, each, 12) for name, each in others.items()),
    )
    return Group(
        rows=(Row("merge HF", Figure(ours), against),),
        memory=(
            MemoryRow("merge HF", ours, 0.15 * c.size.largest_bytes),
            MemoryRow("merge HF, PEFT", peft),
            MemoryRow("merge HF, torchtune", torchtune),
            *(MemoryRow(f"merge HF, {name}", each) for name, each in others.items()),
        ),
        checks=(
            Check(
                "merged: bits that differ from PEFT's",
                lambda: differences(c.out("ours"), c.out("peft")),
            ),
        ),
    )


def convert(c: Checkpoints) -> Group:
    """Between the formats."""
    rows, memory = [], []
    sources = {"hf": c.base, "meta": c.meta, "tune": c.tune}
    for source, to in (("hf", "meta"), ("meta", "hf"), ("hf", "tune"), ("tune", "hf")):
        place = sources[source]
        ours = task("ours", "convert", source=place, to=to, out=c.out("ours"))
        copy = task("raw_jobs", "copy_tree", source=place, out=c.out("copy"))
        theirs = task(
            "torchtune_jobs",
            "convert",
            source=place,
            source_format=source,
            to=to,
            like=sources[to],
            out=c.out("torchtune"),
        )
        against = (_against("cp -r", copy, 1 / 0.75), _against("torchtune", theirs, 3))
        name = f"convert {source} -> {to}"
        rows.append(Row(name, Figure(ours), against))
        memory.append(MemoryRow(name, ours, 0.15 * c.size.largest_bytes))
        memory.append(MemoryRow(f"{name}, torchtune", theirs))
    return Group(rows=tuple(rows), memory=tuple(memory))


def background(c: Checkpoints) -> Group:
    """Saves that are written while training goes on."""
    saved = task("ours", "save_in_background", base=c.base, out=c.out("ours"))
    copy = Against("copy_", (saved.figure("copy"),), 1 / 1.25)
    later = Against("later saves", (saved.figure("blocked"),), 1 / 1.3)
    rows = [
        Row("background save, blocked", saved.figure("blocked"), (copy,)),
        Row("first background save, blocked", saved.figure("first"), (later,)),
        Row("background save, written", saved.figure("written")),
    ]
    for threads, target in ((1, 0.95), (2, None)):
        train = task("ours", "train", base=c.base, out=c.out("train"), threads=threads)
        alone = Against("without", (train.figure("alone"),), target)
        name = f"steps/s beside a save, {threads} thread{'s' if threads > 1 else ''}"
        rows.append(Row(name, train.figure("beside"), (alone,), is_rate=True))
    return Group(rows=tuple(rows), memory=(MemoryRow("background save, after its copy", saved),))


def adapter(c: Checkpoints) -> Group:
    """Saves of an adapter alone."""
    ours = task("ours", "save_adapter", base=c.base, out=c.out("ours"), adapter=c.adapter)
    peft = task("peft_jobs", "save_adapter", base=c.base, out=c.out("peft"), adapter=c.adapter)
    out = c.out("torchtune")
    theirs = task("torchtune_jobs", "save_adapter", base=c.base, out=out, adapter=c.native_adapter)
    raw = task("raw_jobs", "rewrite", directory=c.out("ours"), out=c.out("raw"))
    behind = task(
        "ours",
        "save_in_background",
        base=c.base,
        out=c.out("behind"),
        adapter=c.adapter,
        adapter_only=True,
    )
    against = (
        _against("raw write", raw),
        _against("torchtune", theirs),
        _against("PEFT", peft),
    )
    return Group(
        rows=(
            Row("save adapter alone", Figure(ours), against, at_most=0.020),
            Row("save adapter in background, blocked", behind.figure("blocked"), at_most=0.005),
        ),
        memory=(MemoryRow("save adapter alone", ours, _SAVE_MEMORY),),
        checks=tuple(
            Check(f"adapter alone, {name}", partial(_contents, c.out(name)))
            for name in ("ours", "torchtune", "peft")
        ),
    )


def verify(c: Checkpoints) -> Group:
    """Comparing every byte with its checksum."""
    ours = task("ours", "verify_checkpoint", directory=c.tune)
    reads = [
        task("raw_jobs", "read", directory=c.tune, threads=threads, block=4) for threads in (1, 2)
    ]
    return Group(
        rows=(Row("verify, warm", Figure(ours), (_against("raw read", reads, 0.8),)),),
        memory=(MemoryRow("verify", ours),),
    )


def start(c: Checkpoints) -> Group:
    """Importing the package."""
    torch, package, classes = (
        task("raw_jobs", "start_python", code=f"import {module}")
        for module in ("torch", "checkpointing", "checkpointing.checkpointers")
    )
    against = (_against("import torch", torch, 1 / 1.15),)
    return Group(
        rows=(
            Row("import checkpointing", Figure(package), against),
            Row("import of its classes", Figure(classes), against),
        ),
        extra_rounds=2,
    )


def sharded(c: Checkpoints) -> Group:
    """To the disk, of a model that several processes hold together."""
    layouts = {"2 ranks": (2, 1), "2 ranks, columns cut": (2, 2), "4 ranks, both": (4, 2)}
    rows, checks = [], []
    for layout, (ranks, columns) in layouts.items():
        of_layout = {"base": c.base, "ranks": ranks, "tensor_parallel": columns}
        arguments = of_layout | {"out": c.out("ours")}
        ours = task("sharded_jobs", "save", **arguments)
        dcp = task("sharded_jobs", "save_dcp", **of_layout, out=c.out("dcp"))
        against = _against("DCP, consolidating", dcp, 10)
        rows.append(Row(f"save HF from {layout}", Figure(ours), (against,)))
        memory = task("sharded_jobs", "memory_of_save", **arguments)
        what = f"memory of a rank beside its share, {layout}"
        checks.append(Check(what, partial(_mebibytes, memory)))
    return Group(rows=tuple(rows), checks=tuple(checks))


def limits(c: Checkpoints) -> Group:
    """Jobs that build no model, in little memory."""
    out = c.out("limited")
    jobs = {
        "merge HF": task("ours", "merge", base=c.base, adapter=c.adapter, out=out),
        "convert hf -> meta": task("ours", "convert", source=c.base, to="meta", out=out),
        "convert hf -> tune": task("ours", "convert", source=c.base, to="tune", out=out),
        "convert meta -> hf": task("ours", "convert", source=c.meta, to="hf", out=out),
    }
    return Group(limited=tuple(Limited(name, each, _MEMORY_LIMIT) for name, each in jobs.items()))


def growth(c: Checkpoints) -> Group:
    """Models with a quarter, half and all of the layers."""
    models = [c.with_layers(max(1, c.size.layers // share)) for share in (4, 2)] + [c]
    jobs = {
        "load": [task("ours", "load", base=each.base) for each in models],
        "save HF": [task("ours", "save", base=each.base, out=c.out("save")) for each in models],
        "convert hf -> meta": [
            task("ours", "convert", source=each.base, to="meta", out=c.out("convert"))
            for each in models
        ],
        "merge HF": [
            task("ours", "merge", base=each.base, adapter=each.adapter, out=c.out("merge"))
            for each in models
        ],
    }
    sizes = tuple(each.size.model_bytes for each in models)
    # What is loaded is what the memory is for.
    return Group(
        growth=tuple(
            Growth(job, tuple(tasks), sizes, is_flat=job != "load") for job, tasks in jobs.items()
        )
    )


def stream(c: Checkpoints) -> Group:
    """All weights of a live model with its adapter, for an engine, and the adapter alone."""
    digested, plain = (
        task("ours", "stream", base=c.base, adapter=c.adapter, digests=digests)
        for digests in (True, False)
    )
    fresh, again = (
        [
            task("raw_jobs", "copy_tensors", directory=c.base, threads=threads, fresh=is_fresh)
            for threads in (2, 1)
        ]
        for is_fresh in (True, False)
    )
    peft = task("peft_jobs", "stream", base=c.base, adapter=c.adapter)
    against = (
        _against("memcpy, fresh memory", fresh, 0.5),
        _against("memcpy, the same memory", again),
        _against("PEFT", peft, 3),
    )
    sync = task("ours", "sync_adapter", base=c.smollm2, adapter=c.smollm2_adapter)
    drifts = {
        name: task(side, "drift", base=c.base, adapter=c.adapter, exports=_EXPORTS)
        for name, side in (("ours", "ours"), ("PEFT", "peft_jobs"))
    }
    window = max(c.size.largest_bytes, _SAVE_MEMORY)
    return Group(
        rows=(
            Row("stream", Figure(digested), against),
            Row("stream without digests", Figure(plain), against),
            Row("sync an adapter, SmolLM2-135M", Figure(sync), at_most=0.050),
        ),
        memory=(
            MemoryRow("stream", digested, window + _SAVE_MEMORY),
            MemoryRow("stream, PEFT", peft),
        ),
        checks=tuple(
            Check(f"base changed by {_EXPORTS} exports, {name}", partial(_drift, each))
            for name, each in drifts.items()
        ),
    )


GROUPS = {
    "load": load,
    "cold": cold,
    "save": save,
    "save-others": save_others,
    "merge": merge,
    "convert": convert,
    "background": background,
    "adapter": adapter,
    "verify": verify,
    "start": start,
    "sharded": sharded,
    "limits": limits,
    "growth": growth,
    "stream": stream,
}


def _against(name: str, tasks: Task | list[Task], target: float | None = None) -> Against:
    """The seconds that jobs take; of several, the best counts."""
    several = tasks if isinstance(tasks, list) else [tasks]
    return Against(name, tuple(Figure(each) for each in several), target)


def differences(one: Path, other: Path) -> str:
    """How many tensors of two directories are not the same, bit for bit."""
    found, expected = _tensors(one), _tensors(other)
    if missing := found.keys() ^ expected.keys():
        return f"only one has {sorted(missing)}"
    differing = 0
    for name, path in found.items():
        with safe_open(path, "pt") as a, safe_open(expected[name], "pt") as b:
            bits = [file.get_tensor(name).contiguous().view(torch.uint8) for file in (a, b)]
        differing += not torch.equal(*bits)
    return f"{differing} of {len(found)} tensors"


def _tensors(directory: Path) -> dict[str, Path]:
    tensors: dict[str, Path] = {}
    for path in files_of(directory):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                tensors |= dict.fromkeys(file.keys(), path)
    return tensors


def _contents(directory: Path) -> str:
    files = files_of(directory)
    nbytes = sum(path.stat().st_size for path in files)
    return f"{len(files)} files, {nbytes:,} bytes"


def _drift(drift: Task) -> str:
    with Processes({}).fresh(drift.side) as process:
        return f"{process.run(drift)['changed']:.2%} of the weights"


def _mebibytes(memory: Task) -> str:
    with Processes({}).fresh(memory.side) as process:
        return f"{process.run(memory)['private'] / 2**20:.0f} MiB"
