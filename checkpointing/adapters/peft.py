"""PEFT's adapter directory: ``adapter_model.safetensors`` and ``adapter_config.json``.

Key names and config fields as PEFT reads them (https://github.com/huggingface/peft,
``docs/source/developer_guides/checkpoint.md``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import adapter_modules, check_adapter
from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import ADAPTER_PARAMETERS, LORA_A, LORA_B, Parameter
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource

PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_WEIGHTS_TORCH = "adapter_model.bin"
PEFT_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter as PEFT stores it.

    Attributes:
        tensors: by PEFT's names.
        config: content of ``adapter_config.json``.
    """

    tensors: TensorSource
    config: dict[str, Any]


def to_peft(
    adapter: TensorSource, config: AdapterConfig, layout: Layout, base_model: str
) -> PeftAdapter:
    """A native adapter in PEFT's form.

    LoRA is written in the portable form, since inference engines ignore most of PEFT's config:
    one rank, and one scale ``alpha / r``; what differs from it is folded into ``B``. Modules that
    engines compute as one are all named if one of them carries an adapter, the others with zeros.
    DoRA, which no engine serves, is written exactly as PEFT has it.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
        layout: the base's layout in the Hugging Face format.
        base_model: repository or directory of the base, for PEFT's config.

    Raises:
        TensorMismatchError: if the adapter does not fit the base, or is not whole.
    """
    pairs = {pair.native: pair for pair in layout.pairs if pair.module.takes_adapter}
    shapes = {
        name: (getattr(layout.dims, pair.module.out), getattr(layout.dims, pair.module.in_))
        for name, pair in pairs.items()
    }
    check_adapter(adapter.metas, config, shapes, "saving a PEFT adapter")
    modules = adapter_modules(adapter.metas)
    if config.use_dora:
        tensors, written = _exact(adapter, modules, pairs), modules
        fields = {
            "r": config.r,
            "use_dora": True,
            "use_rslora": config.use_rslora,
            "rank_pattern": {pairs[n].foreign: rank for n, rank in config.rank_pattern.items()},
            "alpha_pattern": {pairs[n].foreign: a for n, a in config.alpha_pattern.items()},
        }
    else:
        rank = max(config.rank(module) for module in modules)
        tensors, written = _portable(adapter, config, modules, rank, pairs, layout)
        fields = {
            "r": rank,
            "use_dora": False,
            "use_rslora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
        }
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        # Engines take it for a whole number, so it is written as one wherever it is.
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": _target_modules(pairs, {pairs[module].foreign for module in written}),
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "lora_bias": False,
        "init_lora_weights": True,
        **fields,
    }
    return PeftAdapter(tensors, peft_config)


def _exact(
    adapter: TensorSource, modules: list[str], pairs: Mapping[str, ModulePair]
) -> LazyTensors:
    metas, compute = {}, {}
    for module in modules:
        for parameter in ADAPTER_PARAMETERS:
            native = f"{module}.{parameter.native}"
            if native in adapter.metas:
                foreign = f"{_PREFIX}{pairs[module].foreign}.{parameter.foreign}"
                metas[foreign] = adapter.metas[native]
                compute[foreign] = partial(_to_foreign, pairs[module], parameter, adapter, native)
    return LazyTensors(metas, compute)


def _to_foreign(
    pair: ModulePair, parameter: Parameter, adapter: TensorSource, native: str
) -> Tensor:
    return pair.to_foreign(adapter.read(native), parameter)


def _portable(
    adapter: TensorSource,
    config: AdapterConfig,
    modules: list[str],
    rank: int,
    pairs: Mapping[str, ModulePair],
    layout: Layout,
) -> tuple[LazyTensors, list[str]]:
    written = _with_fused(modules, pairs, layout.family.fused_in_engines)
    metas, compute = {}, {}
    for module in written:
        pair = pairs[module]
        factor = _fold_factor(config.scale(module), config.alpha / rank)
        like = module if module in modules else modules[0]
        for parameter in (LORA_A, LORA_B):
            sizes = {
                "out": getattr(layout.dims, pair.module.out),
                "in": getattr(layout.dims, pair.module.in_),
                "rank": rank,
            }
            shape = tuple(sizes[axis] for axis in parameter.axes)
            dtype = adapter.metas[f"{like}.{parameter.native}"].dtype
            if parameter is LORA_B and not _is_exact(factor):
                # A product that the adapter's own dtype would round.
                dtype = torch.promote_types(dtype, torch.float32)
            name = f"{_PREFIX}{pair.foreign}.{parameter.foreign}"
            metas[name] = TensorMeta(shape, dtype)
            compute[name] = (
                partial(
                    _portable_tensor,
                    adapter,
                    f"{module}.{parameter.native}",
                    pair,
                    parameter,
                    factor if parameter is LORA_B else 1.0,
                    metas[name],
                )
                if module in modules
                else partial(torch.zeros, shape, dtype=dtype)
            )
    return LazyTensors(metas, compute), written


def _fold_factor(scale: float, written_scale: float) -> float:
    """By what B grows so that the scale may be written plainly; a clean power of two if it is."""
    factor = scale / written_scale
    power = 2.0 ** round(math.log2(factor))
    return power if math.isclose(factor, power, rel_tol=1e-12) else factor


def _is_exact(factor: float) -> bool:
    """Whether multiplying with the factor only changes exponents."""
    return math.frexp(factor)[0] == 0.5


def _portable_tensor(
    adapter: TensorSource,
    native: str,
    pair: ModulePair,
    parameter: Parameter,
    factor: float,
    meta: TensorMeta,
) -> Tensor:
    tensor = adapter.read(native).to(meta.dtype)
    if factor != 1.0:
        tensor = tensor * factor
    tensor = pair.to_foreign(tensor, parameter)
    if tuple(tensor.shape) == meta.shape:
        return tensor
    padded = tensor.new_zeros(meta.shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def _with_fused(
    modules: list[str], pairs: Mapping[str, ModulePair], groups: tuple[tuple[str, ...], ...]
) -> list[str]:
    """The modules and all that engines fuse with them, in the order of the model."""
    wanted = set(modules)
    for module in modules:
        parent, _, last = module.rpartition(".")
        for group in groups:
            if last in group:
                wanted.update(f"{parent}.{other}" for other in group)
    return [name for name in pairs if name in wanted]


def _target_modules(pairs: Mapping[str, ModulePair], written: set[str]) -> list[str]:
    """Last names where they mean all modules of that name, as engines expect; else full names."""
    last_names: dict[str, list[str]] = {}
    for pair in pairs.values():
        last_names.setdefault(pair.foreign.rsplit(".", 1)[-1], []).append(pair.foreign)
    targets = []
    for last, modules in last_names.items():
        carrying = [module for module in modules if module in written]
        targets.extend([last] if carrying == modules else carrying)
    return targets
