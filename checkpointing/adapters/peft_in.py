"""The way in: a PEFT adapter directory as the start of native training.

The inverse of :mod:`checkpointing.adapters.peft`, through the same rules. Key names as PEFT and the
trainers built on it write them (https://github.com/huggingface/peft,
``docs/source/developer_guides/checkpoint.md``).
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.peft import PEFT_CONFIG, PEFT_WEIGHTS, PEFT_WEIGHTS_TORCH
from checkpointing.adapters.peft_config_in import PeftSettings, parse_peft_config
from checkpointing.errors import CheckpointNotFoundError, TensorMismatchError
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import (
    ADAPTER_PARAMETERS,
    LAYER,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TABLE,
    WEIGHT,
    Parameter,
)
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource
from checkpointing.storage.read import open_tensor_file, read_json

logger = logging.getLogger(__name__)

_WRAPPERS = re.compile(r"^(?:(?:base_model|model|module|_orig_mod)\.)+")
# The adapter's name stands between the parameter and `weight` where a trainer saved its own state.
_ADAPTER_KEY = re.compile(
    r"(?P<module>.+)\.(?:(?P<matrix>lora_[AB])(?:\.(?P<name>[^.]+))?\.weight"
    r"|lora_magnitude_vector(?:\.(?!weight$)[^.]+)?(?:\.weight)?)"
)
_BASE_KEY = re.compile(r"(?P<module>.+?)(?:\.base_layer|\.original_module)?\.weight")
_LISTED = 5


@dataclass(frozen=True)
class _Found:
    """A tensor of the file that belongs to a module's adapter.

    Attributes:
        key: its name in the file.
        module_key: the part of it that names the module.
        pair: the native module, or one of those that the foreign module is fused of.
        parameter: which of its adapter's tensors it is.
    """

    key: str
    module_key: str
    pair: ModulePair
    parameter: Parameter

    @property
    def native(self) -> str:
        return f"{self.pair.native}.{self.parameter.native}"

    @property
    def names(self) -> tuple[str, ...]:
        """What a pattern may be written for: the name in the file, or that in the plain model."""
        return self.module_key.removeprefix("base_model.model."), self.pair.foreign


class _Names:
    """Finds the module that a key of the file belongs to, whatever it is wrapped in."""

    def __init__(self, layout: Layout) -> None:
        self._pairs: dict[str, list[ModulePair]] = {}
        for pair in layout.pairs:
            self._pairs.setdefault(_WRAPPERS.sub("", pair.foreign), []).append(pair)
        self._tied = {
            _WRAPPERS.sub("", foreign.removesuffix(".weight")): pair
            for foreign, pair, _ in layout.copies()
        }

    def find(self, key: str) -> list[_Found] | str | None:
        """An adapter's tensor for each native module that it is for.

        What is wrong with it, if anything is; ``None`` if it is no tensor of an adapter.
        """
        match = _ADAPTER_KEY.fullmatch(key)
        if match is None:
            if ".lora_embedding_" in key:
                return f"{key}: an adapter on an embedding, which is not trained natively"
            return f"{key}: not a tensor of a LoRA or DoRA adapter" if ".lora_" in key else None
        core = _WRAPPERS.sub("", match["module"])
        if core in self._tied:
            return f"{key}: the base's {core} is its embedding, which takes no adapter natively"
        pairs = self._pairs.get(core, [])
        if not any(pair.module.takes_adapter for pair in pairs):
            return f"{key}: the base has no such linear module"
        parameter = {"lora_A": LORA_A, "lora_B": LORA_B}.get(match["matrix"], MAGNITUDE)
        return [_Found(key, match["module"], pair, parameter) for pair in pairs]

    def find_base(self, key: str) -> list[tuple[ModulePair, Parameter]]:
        """The weight of the base that a key holds a copy of, for each part of it."""
        match = _BASE_KEY.fullmatch(key)
        core = "" if match is None else _WRAPPERS.sub("", match["module"])
        pairs = self._pairs.get(core, [])
        if core in self._tied:
            pairs = [*pairs, self._tied[core]]
        return [(pair, p) for pair in pairs for p in pair.module.parameters if p in (WEIGHT, TABLE)]


def peft_weights(directory: Path) -> Path:
    """The file with the tensors of a PEFT adapter directory.

    Raises:
        CheckpointNotFoundError: if there is none.
    """
    for name in (PEFT_WEIGHTS, PEFT_WEIGHTS_TORCH):
        if (directory / name).is_file():
            return directory / name
    raise CheckpointNotFoundError(
        f"{directory}: holds neither {PEFT_WEIGHTS} nor {PEFT_WEIGHTS_TORCH}; get the adapter's "
        "weights too"
    )


def read_peft(
    directory: Path, layout: Layout, base: TensorSource | None = None
) -> tuple[LazyTensors, AdapterConfig]:
    """Reads a PEFT adapter directory; see :func:`from_peft`.

    Args:
        directory: holds ``adapter_config.json``, and ``adapter_model.safetensors`` or ``.bin``.
        layout: the base's layout in the Hugging Face format.
        base: the base's native weights.

    Raises:
        CheckpointNotFoundError: if a file is not there.
        CorruptCheckpointError: if a file cannot be read, or would need to run code.
        ConfigError: if the config says what cannot be trained natively.
        TensorMismatchError: lists every tensor that does not belong to the adapter or its base.
    """
    config = read_json(directory / PEFT_CONFIG)
    weights = peft_weights(directory)
    return from_peft(open_tensor_file(weights), config, layout, str(weights), base)


def from_peft(
    tensors: TensorSource,
    config: Mapping[str, Any],
    layout: Layout,
    subject: str,
    base: TensorSource | None = None,
) -> tuple[LazyTensors, AdapterConfig]:
    """A PEFT adapter in native form; the tensors keep their dtypes.

    The tensors decide which modules carry an adapter. Where PEFT saved weights of the base beside
    them (an adapter on ``lm_head`` makes it do so), these must equal the base's, and are left out.

    Args:
        tensors: by PEFT's names, with or without the adapter's name in them, and with any number
            of ``base_model.`` and ``model.`` in front.
        config: content of ``adapter_config.json``.
        layout: the base's layout in the Hugging Face format.
        subject: names the adapter in errors.
        base: the base's native weights, with which saved copies are compared; without it only
            their shapes are checked.

    Raises:
        ConfigError: if the config says what cannot be trained natively.
        TensorMismatchError: lists every tensor that is unknown, missing, misshaped or that stands
            twice, by its name in the file.
    """
    settings = parse_peft_config(config, subject)
    names = _Names(layout)
    by_native: dict[str, _Found] = {}
    problems: list[str] = []
    for key in tensors.metas:
        found = names.find(key)
        if found is None:
            problems += _copy_problems(key, tensors, names, base)
        elif isinstance(found, str):
            problems.append(found)
        elif found[0].native in by_native:
            problems.append(f"{key}: the same tensor as {by_native[found[0].native].key}")
        else:
            by_native.update({one.native: one for one in found})
    order = {pair.native: number for number, pair in enumerate(layout.pairs)}
    ordered = sorted(by_native.values(), key=lambda found: order[found.pair.native])
    modules = {found.pair.native: found for found in ordered}
    adapter_config = _adapter_config(settings, ordered, modules)
    expected = {
        f"{module}.{parameter.native}": _shapes(found.pair, parameter, adapter_config.rank(module))
        for module, found in modules.items()
        for parameter in _parameters(adapter_config)
    }
    problems += _shape_problems(by_native, modules, expected, tensors.metas)
    if not modules and not problems:
        problems.append("no tensor of an adapter at all")
    if problems:
        raise TensorMismatchError(
            subject,
            list(dict.fromkeys(problems)),
            "The adapter must be a LoRA or DoRA adapter of this base: check checkpoint_dir, and "
            f"that {PEFT_CONFIG} and the weights belong together.",
        )
    _warn_of_missing(settings, modules, layout, subject)
    metas = {
        name: TensorMeta(shapes[0], tensors.metas[by_native[name].key].dtype)
        for name, shapes in expected.items()
    }
    return LazyTensors(
        metas, {name: partial(_read, tensors, by_native[name]) for name in metas}
    ), adapter_config


def _read(tensors: TensorSource, found: _Found) -> Tensor:
    # Of a fused module, each part has its own rows of B, and all share A.
    part = found.pair.part_of(tensors.read(found.key), found.parameter)
    return found.pair.to_native(part, found.parameter)


def _adapter_config(
    settings: PeftSettings, found: Sequence[_Found], modules: Mapping[str, _Found]
) -> AdapterConfig:
    ranks = {module: settings.rank_of(one.names) for module, one in modules.items()}
    alphas = {module: settings.alpha_of(one.names) for module, one in modules.items()}
    use_dora = settings.use_dora
    if use_dora is None:
        # torchtune's config does not say it; its tensors do.
        use_dora = any(one.parameter is MAGNITUDE for one in found)
    return AdapterConfig(
        r=settings.r,
        alpha=settings.alpha,
        target_modules=tuple(dict.fromkeys(module.rsplit(".", 1)[-1] for module in modules)),
        dropout=settings.dropout,
        use_dora=use_dora,
        use_rslora=settings.use_rslora,
        rank_pattern={module: rank for module, rank in ranks.items() if rank != settings.r},
        alpha_pattern={module: a for module, a in alphas.items() if a != settings.alpha},
    )


def _parameters(config: AdapterConfig) -> list[Parameter]:
    return [p for p in ADAPTER_PARAMETERS if p is not MAGNITUDE or config.use_dora]


def _shapes(
    pair: ModulePair, parameter: Parameter, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Native and foreign shape of an adapter's tensor."""
    sizes = {
        "out": getattr(pair.dims, pair.module.out),
        "in": getattr(pair.dims, pair.module.in_),
        "rank": rank,
    }
    native = tuple(sizes[axis] for axis in parameter.axes)
    sizes["out"] = pair.foreign_out
    return native, tuple(sizes[axis] for axis in parameter.axes)


def _shape_problems(
    by_native: Mapping[str, _Found],
    modules: Mapping[str, _Found],
    expected: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    metas: Mapping[str, TensorMeta],
) -> list[str]:
    problems = []
    for found in by_native.values():
        shape = metas[found.key].shape
        if found.native not in expected:
            problems.append(f"{found.key}: a DoRA magnitude, but use_dora is false")
        elif shape != expected[found.native][1]:
            problems.append(
                f"{found.key}: {list(shape)}, expected {list(expected[found.native][1])}"
            )
    for module, found in modules.items():
        for parameter in ADAPTER_PARAMETERS:
            native = f"{module}.{parameter.native}"
            if native in expected and native not in by_native:
                problems.append(
                    f"{found.module_key}.{parameter.foreign}: missing, "
                    f"expected {list(expected[native][1])}"
                )
    return problems


def _copy_problems(
    key: str, tensors: TensorSource, names: _Names, base: TensorSource | None
) -> list[str]:
    """What is wrong with a tensor that is none of the adapter's: nothing if the base has it too."""
    shape = tensors.metas[key].shape
    found = names.find_base(key)
    if not found:
        return [f"{key}: unexpected, {list(shape)}"]
    for pair, parameter in found:
        expected = pair.foreign_shape(parameter)
        if shape != expected:
            return [
                f"{key}: {list(shape)}, where the base has {list(expected)}: it was resized; start "
                "from the base that it belongs to"
            ]
        if base is not None:
            own = base.read(f"{pair.native}.{parameter.native}")
            copy = pair.to_native(pair.part_of(tensors.read(key), parameter), parameter)
            if not torch.equal(copy.to(own), own):
                return [
                    f"{key}: differs from the base's: it was trained; start from a base that "
                    "holds it"
                ]
    return []


def _warn_of_missing(
    settings: PeftSettings, modules: Mapping[str, _Found], layout: Layout, subject: str
) -> None:
    """Says which modules the config targets and the file leaves out; PEFT only warns as well."""
    linears = [pair for pair in layout.pairs if pair.module.takes_adapter]
    missing = [
        pair.foreign
        for pair in linears
        if pair.native not in modules
        and settings.targets(pair.foreign, is_head=LAYER not in pair.module.name)
    ]
    if missing:
        logger.warning(
            "%s: target_modules means %d modules more, which have no tensors and get no adapter: "
            "%s%s",
            subject,
            len(missing),
            ", ".join(missing[:_LISTED]),
            " ..." if len(missing) > _LISTED else "",
        )
