"""Where the files of a Megatron checkpoint lie, and what they hold.

Layout (Megatron-LM, ``megatron/training/checkpointing.py``): a directory for each iteration, and a
file that names the latest. In it each rank has a directory with one file of ``torch.save``, or all
ranks together have written a checkpoint of ``torch.distributed.checkpoint``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing.errors import (
    CheckpointingError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
)
from checkpointing.formats.inert_pickle import Inert, StoredTensor, read_inert
from checkpointing.formats.megatron_names import are_megatrons, have_base, plain_name
from checkpointing.formats.megatron_settings import run_settings
from checkpointing.formats.megatron_shards import Rank
from checkpointing.formats.stored_tensors import stored_tensors
from checkpointing.formats.torch_dist import METADATA_NAME, distributed_names, open_distributed
from checkpointing.mapping.model_parallel import Parallel
from checkpointing.mapping.tensors import LazyTensors, TensorMeta
from checkpointing.storage.paths import refuse_link_outside

TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"
RANK_FILE = "model_optim_rng.pt"
_COMMON = "common.pt"
# Since optimizers may be distributed, some releases keep the model apart from them.
_RANK_FILES = (RANK_FILE, "model_rng.pt")
_RANK_DIRECTORY = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_ITERATION = re.compile(r"iter_\d{7,}")
_MODEL = re.compile(r"model(\d*)")
# As long as a number or a word, and a line break.
_MOST_TRACKED = 64


@dataclass(frozen=True)
class MegatronFiles:
    """What the files of a checkpoint hold, by the rules' names.

    Attributes:
        ranks: for each rank the chunks of layers that it has.
        stored: shape and dtype of every tensor that is stored.
        settings: of Megatron's training, as far as they are there.
    """

    ranks: Mapping[Rank, Sequence[LazyTensors]]
    stored: tuple[TensorMeta, ...]
    settings: Mapping[str, Any]


def iteration_directory(directory: Path) -> Path:
    """The directory of the iteration that counts: the latest, or the one that is given.

    Raises:
        CheckpointNotFoundError: if there is none, or not the one that is named as the latest.
    """
    if _files_in(directory):
        return directory
    tracker = directory / TRACKER_NAME
    if tracker.is_file():
        refuse_link_outside(tracker)
        with tracker.open("rb") as file:
            text = file.read(_MOST_TRACKED).decode(errors="replace").strip()
        name = f"iter_{int(text):07d}" if re.fullmatch(r"\d{1,15}", text) else text
        if name == RELEASE or _ITERATION.fullmatch(name):
            if (directory / name).is_dir():
                return directory / name
            raise CheckpointNotFoundError(
                f"{tracker}: names {name}, which is not there; get it, or give the directory of "
                "another iteration"
            )
    raise CheckpointNotFoundError(f"{directory}: holds no iteration of a Megatron checkpoint")


def rank_files(directory: Path) -> list[Path]:
    """The files of all ranks of an iteration, or the one that describes a distributed checkpoint.

    Raises:
        CheckpointNotFoundError: if there are none.
    """
    iteration = iteration_directory(directory)
    files = _files_in(iteration)
    if not files:
        raise CheckpointNotFoundError(
            f"{iteration}: holds neither mp_rank_NN/{RANK_FILE} nor {METADATA_NAME}"
        )
    return files


def _files_in(iteration: Path) -> list[Path]:
    found = [
        path / name
        for path in sorted(iteration.glob("mp_rank_*"))
        for name in _RANK_FILES
        if _RANK_DIRECTORY.fullmatch(path.name) and (path / name).is_file()
    ]
    metadata = iteration / METADATA_NAME
    return found or ([metadata] if metadata.is_file() else [])


def is_distributed(files: Sequence[Path]) -> bool:
    """Whether the ranks have written one checkpoint together."""
    return files[0].name == METADATA_NAME


def tensor_names(files: Sequence[Path]) -> list[str]:
    """Names of tensors as they are stored: all, or those of the first rank.

    Raises:
        CorruptCheckpointError: if a file cannot be read.
        UnsafePathError: if it is a link to a file elsewhere.
    """
    if is_distributed(files):
        return distributed_names(files[0])
    chunks, _ = _open_rank(files[0])
    return [name for chunk in chunks for name in chunk]


def holds_model(files: Sequence[Path]) -> bool:
    """Whether the files hold weights of a Megatron model, and not an adapter alone."""
    return have_base(tensor_names(files))


def open_files(files: Sequence[Path], where: Path) -> MegatronFiles:
    """Reads the headers of a checkpoint; nothing that a file holds is run.

    Args:
        files: from :func:`rank_files`.
        where: names the checkpoint in errors.

    Raises:
        CheckpointNotFoundError: if a rank's file is not there.
        CorruptCheckpointError: if a file cannot be read, or holds no Megatron model.
        UnsafePathError: if it is a link to a file elsewhere.
    """
    if is_distributed(files):
        whole, stored = open_distributed(files[0])
        settings = _distributed_settings(files[0]) or run_settings("model", files[0].parent, where)
        return MegatronFiles({Rank(0, 0, 0): [whole]}, stored, settings)
    opened = {path: _open_rank(path) for path in files}
    settings = opened[files[0]][1]
    numbers = _numbers(opened, settings, where)
    stored = tuple(
        TensorMeta(tensor.shape, tensor.dtype)
        for chunks, _ in opened.values()
        for chunk in chunks
        for tensor in chunk.values()
    )
    ranks = {
        numbers[path]: [_by_plain_names(stored_tensors(path, chunk), path) for chunk in chunks]
        for path, (chunks, _) in opened.items()
    }
    _check_complete(ranks, where)
    return MegatronFiles(ranks, stored, settings)


def _open_rank(path: Path) -> tuple[list[dict[str, StoredTensor]], dict[str, Any]]:
    """The chunks of a model that a file holds, by stored names, and the settings beside them."""
    refuse_link_outside(path)
    try:
        with path.open("rb") as file:
            content = read_inert(file, path.stat().st_size)
    except CheckpointingError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path}: cannot be read ({error}); it must be a file that Megatron saved with "
            "torch 1.6 or later: get it anew"
        ) from error
    numbered = {
        int(match[1] or 0): value
        for key, value in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(key, str) and (match := _MODEL.fullmatch(key)) and isinstance(value, Mapping)
    }
    chunks = [
        {
            name: value
            for name, value in numbered[number].items()
            if isinstance(name, str) and isinstance(value, StoredTensor)
        }
        for number in sorted(numbered)
    ]
    if not any(map(are_megatrons, chunks)):
        raise CorruptCheckpointError(
            f"{path}: has no model with Megatron-core's names (decoder.layers.N...); convert a "
            "checkpoint of older Megatron code with Megatron-LM's tools/checkpoint/convert.py"
        )
    return chunks, _settings(content.get("args"))


def _settings(value: object) -> dict[str, Any]:
    """Megatron's arguments: a namespace, or a dictionary as it is written here."""
    state = value.state if isinstance(value, Inert) else value
    return dict(state) if isinstance(state, Mapping) else {}


def _distributed_settings(metadata: Path) -> dict[str, Any]:
    common = metadata.with_name(_COMMON)
    if not common.is_file():
        return {}
    refuse_link_outside(common)
    try:
        with common.open("rb") as file:
            content = read_inert(file, common.stat().st_size)
    except Exception as error:
        raise CorruptCheckpointError(f"{common}: cannot be read ({error}); get it anew") from error
    return _settings(content.get("args") if isinstance(content, Mapping) else None)


def _by_plain_names(source: LazyTensors, path: Path) -> LazyTensors:
    plain = {name: plain_name(name) for name in source.metas}
    kept = {new: name for name, new in plain.items() if new is not None}
    if len(kept) != sum(new is not None for new in plain.values()):
        raise CorruptCheckpointError(f"{path}: holds a tensor twice, under different names")
    return LazyTensors(
        {new: source.metas[name] for new, name in kept.items()},
        {new: partial(source.rows, name) for new, name in kept.items()},
    )


def _numbers(
    opened: Mapping[Path, tuple[list[dict[str, StoredTensor]], dict[str, Any]]],
    settings: Mapping[str, Any],
    where: Path,
) -> dict[Path, Rank]:
    """Which rank each file is of, by the name of its directory."""
    found: dict[Path, Rank] = {}
    for path in opened:
        match = _RANK_DIRECTORY.fullmatch(path.parent.name)
        assert match is not None
        tensor, *others = (int(number) for number in match.groups() if number is not None)
        if len(others) == 1 and not _is_pipelined(opened, settings):
            others = [0, others[0]]
        pipeline, expert = (*others, 0, 0)[:2]
        rank = Rank(pipeline, expert, tensor)
        if rank in found.values():
            raise ConfigError(f"{where}: {path} and another file are of the same rank; remove one")
        found[path] = rank
    return found


def _is_pipelined(
    opened: Mapping[Path, tuple[list[dict[str, StoredTensor]], dict[str, Any]]],
    settings: Mapping[str, Any],
) -> bool:
    """Whether the one number behind the tensor rank is that of a stage, and not of experts."""
    said = settings.get("pipeline_model_parallel_size")
    if type(said) is int:
        return said > 1
    # Without stages every rank has the first tensors and the last.
    return not all(
        any(name.endswith(end) for chunk in chunks for name in chunk)
        for chunks, _ in opened.values()
        for end in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
    )


def _check_complete(ranks: Mapping[Rank, Sequence[LazyTensors]], where: Path) -> None:
    """Finds a shard that is not there, as far as the numbers of the others tell."""
    size = Parallel(*(max(getattr(r, each) for r in ranks) + 1 for each in _KINDS))
    missing = [
        f"{kind} rank {number}"
        for kind in _KINDS
        for number in range(getattr(size, kind))
        if all(getattr(rank, kind) != number for rank in ranks)
    ]
    # Where experts are not cut, not every tensor-parallel rank need have a file of every expert's.
    missing += [
        f"tensor rank {tensor} of stage {stage}"
        for stage in range(size.pipeline)
        for tensor in range(size.tensor)
        if all((rank.pipeline, rank.tensor) != (stage, tensor) for rank in ranks)
    ]
    if missing:
        raise CheckpointNotFoundError(
            f"{where}: the files of {', '.join(missing)} are not there; get all shards"
        )
    if len({len(chunks) for chunks in ranks.values()}) != 1:
        raise CorruptCheckpointError(
            f"{where}: the ranks have different numbers of chunks of layers; they are not of one "
            "checkpoint"
        )


_KINDS = ("tensor", "pipeline", "expert")
