"""What of a checkpoint is uploaded for others to load: an adapter in PEFT's form, or a model.

Only files of a complete checkpoint are taken, and of these only what transformers or PEFT load, and
licences. No path of this machine goes with them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PureWindowsPath
from typing import Any

from checkpointing.adapter_checkpoint import ADAPTER_NAME, repo_id_of
from checkpointing.adapters.peft import PEFT_CONFIG
from checkpointing.checkpointers import MERGED_DIR
from checkpointing.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from checkpointing.formats.hf_config import CONFIG_NAME
from checkpointing.nf4 import QUANTIZED_BASE_KEY
from checkpointing.progress import bytes_progress
from checkpointing.save_plan import ADAPTER_CONFIG_KEY
from checkpointing.storage.digest import FileDigest
from checkpointing.storage.integrity import damage
from checkpointing.storage.manifest import MANIFEST_NAME, file_digests, read_manifest
from checkpointing.storage.mirror import local
from checkpointing.storage.read import read_json

CARD_NAME = "README.md"
_BASE_KEY = "base_model_name_or_path"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL_WEIGHTS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)
# What transformers and PEFT read beside the weights, and what tells how it may be used.
_SIDE_FILES = (
    "generation_config.json",
    "*tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    "*.py",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "*POLICY*",
)
# What a checkpoint holds for `tune` itself; nobody misses it.
_OWN = {"recipe_state.pt", ADAPTER_NAME, MANIFEST_NAME, "original_repo_id.json"}
# As a shipped config is called, such as smollm2/135M_lora_single_device, or a file of one's own.
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PATH_KEYS = ("path", "file", "dir", "directory")


@dataclass(frozen=True)
class AdapterFacts:
    """An adapter's hyper-parameters, for its model card.

    Attributes:
        kind: such as ``LoRA`` or ``rsDoRA``.
        rank: of all modules, or of those that no pattern names.
        alpha: as the rank.
        targets: last names of the modules that carry it.
        trained_whole: modules that were trained whole.
        base_dtype: where the base was rounded to NF4 in training, from which dtype.
    """

    kind: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    trained_whole: tuple[str, ...] = ()
    base_dtype: str | None = None


@dataclass(frozen=True)
class Upload:
    """What will be uploaded.

    Attributes:
        source: the directory that it comes from.
        is_adapter: an adapter in PEFT's form, rather than a whole model.
        files: by name in the repository: a file on this disk, or the bytes of one that differs.
        card: a README.md that the user has written, or ``None``.
        base_model: the base's repository, or ``None`` if it is not known.
        base_name: what the base is called: its repository, or its directory's last name.
        adapter: the adapter that is uploaded or merged, or ``None``.
        task: PEFT's name of the task or the class of transformers; decides how to load it.
        step: optimizer steps of the training.
        epoch: epochs that were finished before or with the checkpoint, counted from 0.
        recipe: name of the recipe that trained it, if ``tune run`` ran it.
        config: name of the recipe's config.
        left_out: files that are not uploaded although `tune` has no use of its own for them.
        notes: what the user should know, one line each.
        digests: what the files on this disk must hold.
    """

    source: Path
    is_adapter: bool
    files: Mapping[str, Path | bytes]
    card: Path | None
    base_model: str | None
    base_name: str | None
    adapter: AdapterFacts | None
    task: str
    step: int | None = None
    epoch: int | None = None
    recipe: str | None = None
    config: str | None = None
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    digests: Mapping[str, FileDigest] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes, without the model card."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }

    @property
    def summary(self) -> str:
        """What it is, in a few words."""
        kind = f"{self.adapter.kind} adapter" if self.adapter and self.is_adapter else "model"
        return kind if self.step is None else f"{kind} of step {self.step}"


def plan_upload(
    directory: str | Path, merged: bool = False, base_model: str | None = None
) -> Upload:
    """Finds what of a checkpoint others need; reads configs and file sizes, no weights.

    Args:
        directory: a checkpoint, or its URL, or what `tune convert` or `tune merge` wrote.
        merged: of an adapter run, the merged model rather than the adapter.
        base_model: the base's repository, where the checkpoint cannot tell it.

    Raises:
        CheckpointNotFoundError: if it is no complete checkpoint, or does not hold what is wanted.
        CorruptCheckpointError: if a file is missing or has another size than it should.
        ConfigError: if it is in a form that transformers and PEFT do not load.
    """
    directory, merged = _checkpoint_of(local(directory, whole=True), merged)
    manifest = read_manifest(directory)
    if manifest is None:
        raise CheckpointNotFoundError(
            f"{directory}: has no {MANIFEST_NAME}, so it is not known to be a complete checkpoint; "
            "give a directory that `tune` has written, such as epoch_0 (`tune convert` makes one "
            "of any model or adapter)"
        )
    names = set(manifest["files"])
    is_adapter = PEFT_CONFIG in names and not merged
    _check_form(directory, names, manifest, merged)
    source = directory / MERGED_DIR if merged else directory
    prefix = f"{MERGED_DIR}/" if merged else ""
    present = sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    weights = _ADAPTER_WEIGHTS if is_adapter else _MODEL_WEIGHTS
    config = PEFT_CONFIG if is_adapter else CONFIG_NAME
    wanted = [name for name in present if _matches(name, (*weights, config, *_SIDE_FILES))]
    told, known_base = _base_of(directory, manifest)
    base_model = base_model or known_base
    files: dict[str, Path | bytes] = {name: source / name for name in wanted}
    notes = _without_local_paths(files, base_model, told)
    digests = file_digests(directory, manifest)
    left_out = {name for name in present if "/" not in name} - set(wanted) - _OWN
    left_out |= {path.name for path in source.iterdir() if path.is_file()} - set(present) - _OWN
    return Upload(
        source=source,
        is_adapter=is_adapter,
        files=files,
        card=card if (card := source / CARD_NAME).is_file() else None,
        base_model=base_model,
        base_name=base_model or (None if told is None else _last_name(told)),
        adapter=_adapter_facts(directory, manifest) if merged or is_adapter else None,
        task=_task(source, is_adapter),
        step=manifest.get("step"),
        epoch=manifest.get("epoch"),
        recipe=_name_in(manifest, "recipe"),
        config=_name_in(manifest, "config"),
        left_out=tuple(sorted(name for name in left_out - {CARD_NAME} if name[0] != ".")),
        notes=tuple(notes),
        digests={
            name: digests[prefix + name]
            for name, content in files.items()
            if isinstance(content, Path)
        },
    )


def _name_in(manifest: Mapping[str, Any], key: str) -> str | None:
    """A name of a recipe or config, without directories of this machine; none if it is no name."""
    name = manifest.get(key)
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def check_content(upload: Upload) -> None:
    """Reads the files that will be uploaded, and compares them with their checksums.

    Raises:
        CorruptCheckpointError: lists every file that is not what was saved.
    """
    total = sum(digest.size for digest in upload.digests.values())
    with bytes_progress("checking", total) as progress:
        problems = damage(upload.source, upload.digests, progress)
    if problems:
        raise CorruptCheckpointError(
            f"{'; '.join(problems)}; not what was saved, by the checksum in {MANIFEST_NAME}: the "
            "checkpoint is damaged or was changed, upload another one"
        )


def replaced_files(remote: Iterable[str], upload: Upload) -> list[str]:
    """The files of a repository that must go, since they would be loaded in the new ones' place.

    Weights in another number of shards are such: transformers takes a ``model.safetensors`` before
    an index.

    Args:
        remote: names of the files that the repository has.
        upload: what will be uploaded.

    Raises:
        ConfigError: if the repository holds a model and an adapter is to be uploaded, or the other
            way. transformers would load the two together.
    """
    remote = list(remote)
    adapter, model = (*_ADAPTER_WEIGHTS, PEFT_CONFIG), (*_MODEL_WEIGHTS, CONFIG_NAME)
    own, other = (adapter, model) if upload.is_adapter else (model, adapter)
    foreign = [name for name in remote if _matches(name, other)]
    if foreign:
        has, gets = ("a model", "an adapter") if upload.is_adapter else ("an adapter", "a model")
        raise ConfigError(
            f"the repository holds {has} already ({', '.join(foreign)}), to which {gets} cannot be "
            "added: transformers would load both together; give another repository"
        )
    return [name for name in remote if _matches(name, own) and name not in upload.files]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def _checkpoint_of(directory: Path, merged: bool) -> tuple[Path, bool]:
    """The directory with the manifest; who names ``merged`` itself means what is in it."""
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory}: no such directory; give a checkpoint")
    place = directory.resolve()
    in_checkpoint = place.name == MERGED_DIR and not (place / MANIFEST_NAME).is_file()
    if in_checkpoint and (place.parent / MANIFEST_NAME).is_file():
        return directory.parent if directory.name == MERGED_DIR else place.parent, True
    return directory, merged


def _check_form(
    directory: Path, names: set[str], manifest: Mapping[str, Any], merged: bool
) -> None:
    has_adapter = PEFT_CONFIG in names or ADAPTER_NAME in names
    if merged and f"{MERGED_DIR}/{CONFIG_NAME}" not in names:
        if not has_adapter:
            raise CheckpointNotFoundError(
                f"{directory}: holds no adapter, and so no merged model; leave out --merged"
            )
        raise CheckpointNotFoundError(
            f"{directory}: holds no merged model; make one with `tune merge BASE {directory} OUT` "
            "and upload OUT"
        )
    if merged or PEFT_CONFIG in names:
        return
    if has_adapter:
        raise ConfigError(
            f"{directory}: holds a native adapter alone, which only `tune` reads; make PEFT's form "
            f"of it with `tune convert {directory} OUT --to peft` and upload OUT"
        )
    if manifest.get("format") != "hf":
        raise ConfigError(
            f"{directory}: holds a model in the format {manifest.get('format')}, which "
            f"transformers does not load; convert it with `tune convert {directory} OUT --to hf` "
            "and upload OUT"
        )


def _base_of(directory: Path, manifest: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """What the checkpoint calls its base, and the base's repository if one is known."""
    told = manifest.get("base", {}).get("directory")
    if (directory / PEFT_CONFIG).is_file():
        name = read_json(directory / PEFT_CONFIG).get(_BASE_KEY)
        if isinstance(name, str) and name and not _is_local(name):
            return name, name
        told = told or name
    # A whole model carries the note of its base with it.
    places = [directory] if told is None else [Path(told)]
    known = (repo_id_of(place) for place in places if place.is_dir())
    return told, next(filter(None, known), None)


def _is_local(name: str) -> bool:
    """Whether PEFT's name of a base is a place on this machine rather than a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if _is_path(name) or Path(name).is_dir():
        return True
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def _is_path(value: str) -> bool:
    absolute = Path(value).is_absolute() or PureWindowsPath(value).is_absolute()
    return absolute or value.startswith(("./", "../", "~", ".\\", "..\\"))


def _last_name(path: str) -> str:
    return PureWindowsPath(path).name if "\\" in path else Path(path).name


def _without_local_paths(
    files: dict[str, Path | bytes], base_model: str | None, told: str | None
) -> list[str]:
    """Replaces configs that name places on this machine, and tells what was changed."""
    notes = []
    for name, path in list(files.items()):
        if not name.endswith("config.json") or not isinstance(path, Path):
            continue
        content = read_json(path)
        changed = dict(content)
        if name == PEFT_CONFIG:
            base = base_model or (None if told is None else _last_name(told))
            changed[_BASE_KEY] = base
            if base_model is None:
                said = (
                    f"by the directory {told}, of which only {base!r} is uploaded"
                    if told
                    else "not"
                )
                notes.append(
                    f"the base's repository is not known ({PEFT_CONFIG} names it {said}), so "
                    "others cannot tell which model to load; give it with --base-model OWNER/NAME"
                )
        dropped: list[str] = []
        changed = _drop_paths(changed, dropped)
        if dropped:
            notes.append(f"{name}: {', '.join(dropped)}: a path of this machine, not uploaded")
        if changed != content:
            files[name] = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
    return notes


def _drop_paths(content: dict[str, Any], dropped: list[str]) -> dict[str, Any]:
    kept = {}
    for key, value in content.items():
        if isinstance(value, dict):
            kept[key] = _drop_paths(value, dropped)
        elif isinstance(value, str) and key.lower().endswith(_PATH_KEYS) and _is_path(value):
            dropped.append(key)
        else:
            kept[key] = value
    return kept


def _adapter_facts(directory: Path, manifest: Mapping[str, Any]) -> AdapterFacts | None:
    # PEFT's names are what readers of a model card know; families that PEFT lacks have none.
    path = directory / PEFT_CONFIG
    raw = read_json(path) if path.is_file() else manifest.get(ADAPTER_CONFIG_KEY)
    if raw is None:
        return None
    targets = raw.get("target_modules") or ()
    targets = (targets,) if isinstance(targets, str) else targets
    rounding = manifest.get("base", {}).get(QUANTIZED_BASE_KEY) or {}
    prefix = "rs" if raw.get("use_rslora") else ""
    return AdapterFacts(
        kind=prefix + ("DoRA" if raw.get("use_dora") else "LoRA"),
        rank=raw["r"],
        alpha=raw["lora_alpha"],
        targets=tuple(dict.fromkeys(name.rpartition(".")[2] for name in targets)),
        trained_whole=tuple(raw.get("modules_to_save") or ()),
        base_dtype=rounding.get("dtype"),
    )


def _task(source: Path, is_adapter: bool) -> str:
    if is_adapter:
        return str(read_json(source / PEFT_CONFIG).get("task_type") or "")
    classes = read_json(source / CONFIG_NAME).get("architectures") or [""]
    return str(classes[0])
