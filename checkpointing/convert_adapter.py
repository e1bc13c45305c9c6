"""Changing the form of an adapter, native, PEFT's or Megatron's, with no model built.

:func:`plan_adapter_conversion` finds all that is wrong from headers and configs;
:func:`write_adapter` writes what it gave.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.adapter_checkpoint import (
    ADAPTER_NAME,
    AdapterCheckpoint,
    has_adapter,
    open_adapter,
    repo_id_of,
    write_peft,
)
from checkpointing.adapters.megatron import MegatronAdapter, to_megatron
from checkpointing.adapters.peft import PEFT_CONFIG, PEFT_WEIGHTS, PeftAdapter, to_peft
from checkpointing.convert import check_destination, written
from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.families import FAMILIES
from checkpointing.formats.base import OpenModel, check_one_rank, native_layout
from checkpointing.formats.detect import find_model
from checkpointing.formats.hf_config import CONFIG_NAME
from checkpointing.formats.megatron import check_family
from checkpointing.formats.megatron_adapter import check_ranks, write_megatron_adapter
from checkpointing.formats.megatron_files import TRACKER_NAME
from checkpointing.formats.megatron_settings import SETTINGS_NAME
from checkpointing.formats.megatron_shards import ranks_of
from checkpointing.formats.megatron_write import file_name
from checkpointing.formats.meta import PARAMS_NAME
from checkpointing.formats.tune import missing_config
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.model_parallel import ONE_RANK, Parallel
from checkpointing.mapping.tensors import TensorSource
from checkpointing.nf4 import PEFT_NOTE, QUANTIZED_BASE_KEY
from checkpointing.save_plan import ADAPTER_CONFIG_KEY
from checkpointing.storage.fingerprint import fingerprint
from checkpointing.storage.mirror import local, origin_of
from checkpointing.storage.publish import published
from checkpointing.storage.side_files import side_files

# In a directory with one of the first, transformers and `tune` would look for a model; the others
# are of the form that the adapter had.
_NOT_COPIED = {CONFIG_NAME, PARAMS_NAME, "generation_config.json", TRACKER_NAME, SETTINGS_NAME}


@dataclass(frozen=True)
class AdapterToWrite:
    """All that will be written, checked, before a byte of it is.

    Attributes:
        source: the adapter that it is made from.
        base: directory of its base.
        written: what is written: native tensors, or the adapter as PEFT or Megatron stores it.
        config: the base's; Megatron's files say some of it.
        parallel: number of ranks, each with files of its own, in Megatron's form.
        side_files: files to copy as they are.
        facts: for the manifest.
        notes: what the user should know, one line each.
    """

    source: AdapterCheckpoint
    base: Path
    written: TensorSource | PeftAdapter | MegatronAdapter
    config: ModelConfig | None
    parallel: Parallel
    side_files: tuple[Path, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> TensorSource:
        """The tensors that are written."""
        if isinstance(self.written, PeftAdapter | MegatronAdapter):
            return self.written.tensors
        return self.written

    @property
    def peft(self) -> PeftAdapter | None:
        """The adapter as PEFT stores it, if that is written."""
        return self.written if isinstance(self.written, PeftAdapter) else None

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(meta.nbytes for meta in self.tensors.metas.values())

    @property
    def files(self) -> list[str]:
        """Names of the files with tensors."""
        if isinstance(self.written, MegatronAdapter):
            return [file_name(rank, self.parallel) for rank in ranks_of(self.parallel)]
        return [ADAPTER_NAME if self.peft is None else PEFT_WEIGHTS]

    @property
    def other_files(self) -> list[str]:
        """Names of all others."""
        configs = {PeftAdapter: [PEFT_CONFIG], MegatronAdapter: [SETTINGS_NAME, TRACKER_NAME]}
        return [*configs.get(type(self.written), ()), *(path.name for path in self.side_files)]


def is_adapter(path: Path) -> bool:
    """Whether a path leads to an adapter and to no model beside it."""
    if path.is_file():
        return True
    if not path.is_dir() or not has_adapter(path):
        return False
    try:
        find_model(path)
    except CheckpointNotFoundError:
        return True
    return False


def plan_adapter_conversion(
    source: str | Path,
    to: str,
    base: str | Path | None = None,
    form: str = "portable",
    model_type: str | None = None,
    parallel: Parallel = ONE_RANK,
) -> AdapterToWrite:
    """Plans the same adapter in another form.

    Args:
        source: a native adapter file, a checkpoint that holds one, or a directory of PEFT's or
            Megatron's; or the URL of one.
        to: ``"peft"``, ``"megatron"``, or ``"tune"`` for native.
        base: directory of the adapter's base in any format; by default where the adapter says that
            it is.
        form: of a PEFT adapter, ``"portable"`` or ``"exact"``.
        model_type: needed where no config file names the base's family.
        parallel: number of ranks, of Megatron's form.

    Raises:
        CheckpointNotFoundError: if there is no adapter or no base.
        ConfigError: if the form is unknown or cannot hold the adapter, the base is another one than
            the adapter's, or nothing tells the base or the adapter's rank and alpha.
        TensorMismatchError: lists every tensor of the adapter that does not fit the base.
    """
    source = local(source)
    place = local(base) if base else _base_of(open_adapter(source))
    model = find_model(place).open(model_type)
    adapter = open_adapter(source, model)
    adapter.check_base(model.native, place)
    if to != "megatron":
        check_one_rank(parallel, to)
    written: TensorSource | PeftAdapter | MegatronAdapter = adapter.tensors
    notes: tuple[str, ...] = ()
    if to == "peft":
        layout = native_layout(model.native, model, "hf")
        name = _name_of(place, adapter)
        written = to_peft(adapter.tensors, adapter.config, layout, name, form, model.native)
        notes = (*written.notes, *_notes(adapter))
    elif to == "megatron":
        written = _for_megatron(adapter, model, parallel, place)
        notes = tuple(_notes(adapter))
    return AdapterToWrite(
        source=adapter,
        base=place,
        written=written,
        config=model.config,
        parallel=parallel,
        side_files=tuple(p for p in side_files(adapter.directory) if p.name not in _NOT_COPIED),
        facts=_facts(adapter, model, place, to),
        notes=notes,
    )


def _for_megatron(
    adapter: AdapterCheckpoint, model: OpenModel, parallel: Parallel, where: Path
) -> MegatronAdapter:
    if model.config is None:
        raise missing_config(where)
    check_family(FAMILIES[model.config.family], str(where))
    layout = native_layout(model.native, model, "megatron")
    made = to_megatron(adapter.tensors, adapter.config, layout)
    check_ranks(parallel, model.config.dims, made)
    return made


def _base_of(adapter: AdapterCheckpoint) -> Path:
    place = adapter.base_directory
    if place is None or not place.is_dir():
        told = "it does not say which" if place is None else f"it says {place}, which is not here"
        raise ConfigError(
            f"{adapter.path}: its base is needed, and {told}; give its directory with --base"
        )
    return place


def _name_of(base: Path, adapter: AdapterCheckpoint) -> str:
    """What PEFT's config calls the base: its repository where one is known."""
    told = adapter.base_directory if adapter.format == "peft" else None
    if told is not None and not told.is_absolute() and not told.is_dir():
        return str(told)
    return repo_id_of(base) or str(base.resolve())


def _facts(adapter: AdapterCheckpoint, model: OpenModel, base: Path, to: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "format": to,
        "family": None if model.config is None else model.config.family,
        "converted_from": {
            "directory": origin_of(adapter.path),
            "format": adapter.format,
        },
        "base": {"directory": str(base.resolve()), "fingerprint": fingerprint(model.native)},
    }
    if adapter.base_rounding is not None:
        facts["base"][QUANTIZED_BASE_KEY] = adapter.base_rounding.to_state()
    if to == "tune":
        facts[ADAPTER_CONFIG_KEY] = adapter.config.to_state()
    return facts


def _notes(adapter: AdapterCheckpoint) -> list[str]:
    return [] if adapter.base_rounding is None else [PEFT_NOTE]


def write_adapter(plan: AdapterToWrite, destination: str | Path, overwrite: bool = False) -> None:
    """Writes a planned adapter; the directory appears whole, or not at all.

    Args:
        plan: from :func:`plan_adapter_conversion`.
        destination: the directory to write, or its URL.
        overwrite: replace an existing one.

    Raises:
        ConfigError: if the destination exists, or lies in what is read or around it.
        OutOfSpaceError: if the disk has no room; nothing is written then.
        WriteError: if the system refuses to write, or it cannot be uploaded.
    """
    check_destination(destination, (plan.source.path, plan.base), overwrite)
    with published(destination) as directory, written(directory, plan.nbytes) as writer:
        for side_file in plan.side_files:
            writer.copy(side_file)
        if plan.peft is not None:
            write_peft(writer, plan.peft)
        elif isinstance(plan.written, MegatronAdapter):
            assert plan.config is not None
            write_megatron_adapter(writer, plan.written, plan.config, plan.parallel)
        else:
            writer.tensors(ADAPTER_NAME, plan.tensors)
        writer.manifest(plan.facts)
