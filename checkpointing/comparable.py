"""What two directories hold that can be compared: two models, or two adapters."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.adapter_checkpoint import (
    AdapterCheckpoint,
    find_adapter,
    has_adapter,
    open_adapter,
)
from checkpointing.adapters.peft import PEFT_CONFIG
from checkpointing.adapters.peft_config_in import WITHOUT_EFFECT
from checkpointing.adapters.peft_in import peft_weights
from checkpointing.errors import CheckpointNotFoundError, ConfigError
from checkpointing.formats.detect import FoundModel, find_model
from checkpointing.mapping.tensors import TensorSource
from checkpointing.storage.mirror import local
from checkpointing.storage.read import open_tensor_file, read_json


@dataclass(frozen=True)
class Setting:
    """A hyper-parameter that two adapters do not share.

    Attributes:
        name: which one.
        a: its value in A, as text.
        b: its value in B, as text.
    """

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class Pair:
    """Two models, or two adapters, in the same names.

    Attributes:
        a: tensors of A.
        b: tensors of B.
        settings: hyper-parameters that differ, of adapters.
        notes: what could not be compared, and why.
    """

    a: TensorSource
    b: TensorSource
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()


def open_pair(
    a: str | Path,
    b: str | Path,
    model_type: str | None = None,
    base: str | Path | None = None,
) -> Pair:
    """Opens the models of two directories, or else their adapters, in native names and layout.

    Two PEFT adapters keep PEFT's names and layout, unless their base is given.

    Args:
        a: directory of a model in any format, or of an adapter, native or PEFT's; or its URL.
        b: the same.
        model_type: needed where no config file names the family.
        base: base of a PEFT adapter, by default where one of the adapters says that it is.

    Raises:
        CheckpointNotFoundError: if a directory holds neither.
        ConfigError: if one holds a model and the other an adapter, or if the base of a PEFT adapter
            is needed and not there.
        CheckpointingError: if a file is damaged, or does not fit the config or the base.
    """
    a, b = local(a), local(b)
    base = None if base is None else local(base)
    first, second = _find_model(a), _find_model(b)
    if first is not None and second is not None:
        return Pair(first.open(model_type).native, second.open(model_type).native)
    for model, other in ((a, b), (b, a)):
        if not has_adapter(model):
            raise ConfigError(
                f"{model} holds a model and {other} an adapter, which have no tensors in common; "
                "give two models (`tune merge` makes one of an adapter) or two adapters"
            )
    return _open_adapters(find_adapter(a), find_adapter(b), model_type, base)


def _find_model(directory: Path) -> FoundModel | None:
    try:
        return find_model(directory)
    except CheckpointNotFoundError:
        if not has_adapter(directory):
            raise
        return None


def _open_adapters(a: Path, b: Path, model_type: str | None, base: Path | None) -> Pair:
    """Of native files and PEFT's directories."""
    if base is None and all((each / PEFT_CONFIG).is_file() for each in (a, b)):
        return _open_in_peft_names(a, b)
    model = None
    if a.is_dir() or b.is_dir():
        model = find_model(base or _find_base((a, b))).open(model_type)
    first, second = (open_adapter(path, model) for path in (a, b))
    unknown = [each for each in (first, second) if each.told_config is None]
    notes = tuple(f"{each.path}: rank and alpha are not known, nor compared" for each in unknown)
    settings = [] if unknown else _different(first.config.to_state(), second.config.to_state())
    settings += _different_bases(first, second)
    return Pair(first.tensors, second.tensors, tuple(settings), notes)


def _find_base(paths: Sequence[Path]) -> Path:
    places = []
    for path in paths:
        place = open_adapter(path).base_directory
        places += [place] if place else []
    for place in places:
        if place.is_dir():
            return place
    native, foreign = sorted(paths, key=Path.is_dir)
    where = " or ".join(dict.fromkeys(map(str, places)))
    raise ConfigError(
        f"{native} and {foreign} are adapters of different forms, which have names in common only "
        f"with their base, and that is {f'not at {where}' if where else 'not known'}; give its "
        "directory with --base"
    )


def _open_in_peft_names(a: Path, b: Path) -> Pair:
    first, second = (open_tensor_file(peft_weights(each)) for each in (a, b))
    configs = (read_json(each / PEFT_CONFIG) for each in (a, b))
    notes: tuple[str, ...] = ()
    if first.metas.keys().isdisjoint(second.metas):
        notes = ("no name is in both; with the base given as --base, native names are compared",)
    return Pair(first, second, tuple(_different(*configs)), notes)


def _different_bases(a: AdapterCheckpoint, b: AdapterCheckpoint) -> list[Setting]:
    first, second = (each.manifest.get("base", {}).get("fingerprint") for each in (a, b))
    if first is None or second is None or first == second:
        return []
    texts = (f"{each.base_directory} ({print_})" for each, print_ in ((a, first), (b, second)))
    return [Setting("base", *texts)]


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Setting]:
    """Of two configs in PEFT's terms, which native ones share."""
    first, second = _flat(a), _flat(b)
    return [
        Setting(name, json.dumps(first.get(name)), json.dumps(second.get(name)))
        for name in dict.fromkeys((*first, *second))
        # A field that is null, false or left out says the same.
        if (first.get(name) or None) != (second.get(name) or None)
    ]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if name in WITHOUT_EFFECT:
            continue
        if isinstance(value, dict):
            flat |= {f"{name}[{key}]": each for key, each in value.items()}
        else:
            # PEFT writes some lists in the order of a set.
            flat[name] = sorted(value, key=str) if isinstance(value, list) else value
    return flat
