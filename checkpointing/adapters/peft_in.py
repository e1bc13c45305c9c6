"""The way in: a PEFT adapter directory as the start of native training.

The inverse of :mod:`checkpointing.adapters.peft`, through the same rules.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.peft import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PEFT_WEIGHTS_TORCH,
    check_in_peft,
)
from checkpointing.adapters.peft_config_in import PeftSettings, parse_peft_config
from checkpointing.adapters.peft_experts import UnpackedExperts, unpack
from checkpointing.adapters.peft_names import AdapterTensor, PeftNames, Place
from checkpointing.adapters.peft_whole_in import whole_from_peft
from checkpointing.errors import CheckpointNotFoundError, TensorMismatchError
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import LAYER, Parameter
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource
from checkpointing.storage.read import open_tensor_file, read_json

logger = logging.getLogger(__name__)

_LISTED = 5


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

    The tensors decide which modules carry an adapter, and ``modules_to_save`` which ones were
    trained whole. Where PEFT saved other weights of the base beside them (an adapter on ``lm_head``
    makes it do so), these must equal the base's, and are left out.

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
    check_in_peft(layout)
    settings = parse_peft_config(config, subject)
    names = PeftNames(layout)
    packed = unpack(tensors, layout, settings.target_parameters)
    places: dict[Place, AdapterTensor] = {}
    problems = list(packed.problems)
    beside: list[str] = []
    for key in tensors.metas:
        if key in packed.keys:
            continue
        found = names.find(key)
        if found is None:
            beside.append(key)
        elif isinstance(found, str):
            problems.append(found)
        elif found[0].place in places:
            problems.append(f"{key}: the same tensor as {places[found[0].place].key}")
        else:
            places.update({one.place: one for one in found})
    whole = whole_from_peft(tensors, beside, settings, layout, base)
    problems += whole.problems
    carrying = {found.pair.native for found in places.values()}
    modules: dict[str, list[ModulePair]] = {}
    for pair in layout.pairs:
        if pair.native in carrying:
            modules.setdefault(pair.native, []).append(pair)
    adapter_config, differing = _adapter_config(settings, places.values(), modules, packed)
    adapter_config = replace(adapter_config, modules_to_save=whole.modules_to_save)
    problems += differing
    metas: dict[str, TensorMeta] = {}
    compute = {}
    for module, pairs in modules.items():
        for parameter in _parameters(pairs[0], adapter_config):
            own = [places.get((parameter.native_name(module), pair.expert or 0)) for pair in pairs]
            rank = adapter_config.rank(module)
            problems += _shape_problems(pairs, own, parameter, rank, tensors.metas, places)
            parts = [one for one in own if one is not None]
            dtypes = [tensors.metas[one.key].dtype for one in parts]
            name = parameter.native_name(module)
            metas[name] = TensorMeta(
                pairs[0].native_shape(parameter, rank),
                reduce(torch.promote_types, dtypes) if dtypes else torch.float32,
            )
            compute[name] = partial(_read, tensors, parts, metas[name].dtype)
    problems += [_unwanted(one) for one in places.values() if one.native not in metas]
    if not modules and not packed.ranks and not problems:
        problems.append("no tensor of an adapter at all")
    if problems:
        raise TensorMismatchError(
            subject,
            list(dict.fromkeys(problems)),
            "The adapter must be a LoRA or DoRA adapter of this base: check checkpoint_dir, and "
            f"that {PEFT_CONFIG} and the weights belong together.",
        )
    _warn_of_missing(settings, modules, layout, subject)
    for other in (packed.tensors, whole.tensors):
        metas |= other.metas
        compute |= {name: partial(other.read, name) for name in other.metas}
    return LazyTensors.of_whole(metas, compute), adapter_config


def _unwanted(found: AdapterTensor) -> str:
    if _is_of(found, "magnitude"):
        return f"{found.key}: a DoRA magnitude, but use_dora is false"
    return f"{found.key}: a bias of B, but lora_bias is false"


def _read(tensors: TensorSource, parts: Sequence[AdapterTensor], dtype: torch.dtype) -> Tensor:
    native = []
    for one in parts:
        # Of a fused module, each part has its own rows of B, and all share A.
        part = one.pair.part_of(tensors.read(one.key).to(dtype), one.parameter)
        native.append(one.pair.to_native(part, one.parameter))
    if parts[0].pair.expert is None:
        return native[0]
    return torch.stack(native, parts[0].parameter.axes.index("expert"))


def _adapter_config(
    settings: PeftSettings,
    found: Collection[AdapterTensor],
    modules: Mapping[str, Sequence[ModulePair]],
    packed: UnpackedExperts,
) -> tuple[AdapterConfig, list[str]]:
    """The adapter's native config, and what keeps it from being one."""
    ranks: dict[str, set[int]] = {module: set() for module in modules}
    alphas: dict[str, set[float]] = {module: set() for module in modules}
    for one in found:
        own = settings.names_of(one.names)
        ranks[one.pair.native].add(settings.rank_of(own))
        alphas[one.pair.native].add(settings.alpha_of(own))
    for module, name in packed.names.items():
        ranks[module] = {settings.rank_of([name])}
        alphas[module] = {settings.alpha_of([name])}
    problems = [
        f"{module}: the experts of a layer have ranks {sorted(ranks[module])} and alphas "
        f"{sorted(alphas[module])}, which must be the same for all"
        for module in modules
        if len(ranks[module]) > 1 or len(alphas[module]) > 1
    ]
    problems += [
        f"{packed.names[module]}: has rank {rank}, and by the config {min(ranks[module])}"
        for module, rank in packed.ranks.items()
        if ranks[module] != {rank}
    ]
    # torchtune's config does not say these; its tensors do.
    use_dora, lora_bias = settings.use_dora, settings.lora_bias
    if use_dora is None:
        use_dora = any(_is_of(one, "magnitude") for one in found)
    if lora_bias is None:
        lora_bias = any(_is_of(one, "bias") for one in found)
    config = AdapterConfig(
        r=settings.r,
        alpha=settings.alpha,
        target_modules=tuple(dict.fromkeys(module.rsplit(".", 1)[-1] for module in ranks)),
        dropout=settings.dropout,
        use_dora=use_dora,
        use_rslora=settings.use_rslora,
        rank_pattern={m: min(r) for m, r in ranks.items() if min(r) != settings.r},
        alpha_pattern={m: min(a) for m, a in alphas.items() if min(a) != settings.alpha},
        lora_bias=lora_bias,
    )
    return config, problems


def _is_of(found: AdapterTensor, which: str) -> bool:
    return found.parameter is getattr(found.pair.module.adapter, which)


def _parameters(pair: ModulePair, config: AdapterConfig) -> tuple[Parameter, ...]:
    kind = pair.module.adapter
    assert kind is not None
    return config.parameters(kind)


def _every_parameter(pair: ModulePair) -> tuple[Parameter, ...]:
    kind = pair.module.adapter
    assert kind is not None
    return kind.parameters


def _shape_problems(
    pairs: Sequence[ModulePair],
    found: Sequence[AdapterTensor | None],
    parameter: Parameter,
    rank: int,
    metas: Mapping[str, TensorMeta],
    places: Mapping[Place, AdapterTensor],
) -> list[str]:
    """What is wrong with one native tensor: foreign ones that are missing or misshapen."""
    problems = []
    # The experts of a layer are alike.
    shape = pairs[0].foreign_shape(parameter, rank)
    for pair, one in zip(pairs, found, strict=True):
        if one is not None and metas[one.key].shape != shape:
            problems.append(f"{one.key}: {list(metas[one.key].shape)}, expected {list(shape)}")
        if one is None:
            siblings = [
                places.get((other.native_name(pair.native), pair.expert or 0))
                for other in _every_parameter(pair)
            ]
            named = [known.module_key for known in siblings if known is not None]
            name = named[0] if named else f"base_model.model.{pair.foreign}"
            problems.append(f"{parameter.foreign_name(name)}: missing, expected {list(shape)}")
    return problems


def _warn_of_missing(
    settings: PeftSettings,
    modules: Mapping[str, Sequence[ModulePair]],
    layout: Layout,
    subject: str,
) -> None:
    """Says which modules the config targets and the file leaves out; PEFT only warns as well."""
    linears = [pair for pair in layout.pairs if pair.module.adapter is not None]
    missing = [
        pair.foreign
        for pair in linears
        if pair.native not in modules
        and pair.expert is None
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
