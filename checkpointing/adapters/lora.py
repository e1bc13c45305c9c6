"""The arithmetic of LoRA and DoRA on native tensors."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.rules import ADAPTER_PARAMETERS, LORA_A, LORA_B, MAGNITUDE
from checkpointing.mapping.tensors import LazyTensors, TensorMeta, TensorSource, as_source


def merged_weight(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """A weight with its adapter folded in, computed in fp32 (fp64 for fp64) and rounded once.

    LoRA (Hu et al. 2021): ``W + s B A``. DoRA (Liu et al. 2024): each output row of that, divided
    by its norm and multiplied with its magnitude.

    Args:
        weight: ``[out, in]``, of any floating dtype, which is also that of the result.
        lora_a: ``[r, in]``.
        lora_b: ``[out, r]``.
        scale: the factor s.
        magnitude: ``[out]``, for DoRA.

    Returns:
        A new tensor ``[out, in]``; the inputs are not changed.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    delta = (lora_b.to(dtype) @ lora_a.to(dtype)) * scale
    merged = weight.to(dtype) + delta
    if magnitude is not None:
        norms = torch.linalg.vector_norm(merged, dim=1)
        merged = merged * (magnitude.to(dtype) / norms)[:, None]
    return merged.to(weight.dtype)


def adapter_modules(names: Mapping[str, object]) -> list[str]:
    """Full native names of the modules that carry an adapter, in the order given."""
    modules: dict[str, None] = {}
    for name in names:
        for parameter in ADAPTER_PARAMETERS:
            if name.endswith(f".{parameter.native}"):
                modules[name.removesuffix(f".{parameter.native}")] = None
    return list(modules)


def check_adapter(
    adapter: Mapping[str, TensorMeta],
    config: AdapterConfig,
    base_shapes: Mapping[str, tuple[int, ...]],
    subject: str,
) -> None:
    """Checks that an adapter is whole and fits its base, before anything is done with it.

    Args:
        adapter: the native adapter tensors.
        config: its hyper-parameters.
        base_shapes: shape ``(out, in)`` of every linear module of the base, by native name.
        subject: names the adapter in errors.

    Raises:
        TensorMismatchError: lists every tensor that is unknown, missing or misshaped.
    """
    problems = []
    modules = adapter_modules(adapter)
    expected: dict[str, tuple[int, ...]] = {}
    for module in modules:
        if module not in base_shapes:
            problems.append(f"{module}: the base has no such linear module")
            continue
        sizes = dict(zip(("out", "in"), base_shapes[module], strict=True))
        sizes["rank"] = config.rank(module)
        for parameter in ADAPTER_PARAMETERS:
            if parameter is not MAGNITUDE or config.use_dora:
                shape = tuple(sizes[axis] for axis in parameter.axes)
                expected[f"{module}.{parameter.native}"] = shape
    for name, shape in expected.items():
        if name not in adapter:
            problems.append(f"{name}: missing, expected {list(shape)}")
        elif adapter[name].shape != shape:
            problems.append(f"{name}: {list(adapter[name].shape)}, expected {list(shape)}")
    for name in adapter:
        if name not in expected and not any(name.startswith(f"{module}.") for module in modules):
            problems.append(f"{name}: not a tensor of an adapter")
        elif name not in expected and name.removesuffix(f".{MAGNITUDE.native}") in base_shapes:
            problems.append(f"{name}: a DoRA magnitude, but the adapter's config says plain LoRA")
    for target in config.target_modules:
        if not any(module.rsplit(".", 1)[-1] == target for module in modules):
            problems.append(f"{target}: a target module of the adapter without any tensor")
    if problems:
        raise TensorMismatchError(
            subject,
            problems,
            "The adapter must be that of this base, with the same rank and target modules: check "
            "checkpoint_dir, adapter_checkpoint and the adapter's config.",
        )


def config_of_tensors(adapter: Mapping[str, TensorMeta]) -> AdapterConfig:
    """The ranks, targets and kind of an adapter whose config is not known.

    The alpha, which tensors do not show, is set to the rank.
    """
    modules = adapter_modules(adapter)
    ranks = {
        module: meta.shape[0]
        for module in modules
        if (meta := adapter.get(f"{module}.{LORA_A.native}")) is not None and meta.shape
    }
    rank = next(iter(ranks.values()), 1)
    return AdapterConfig(
        r=rank,
        alpha=rank,
        target_modules=tuple(dict.fromkeys(module.rsplit(".", 1)[-1] for module in modules)),
        use_dora=any(name.endswith(f".{MAGNITUDE.native}") for name in adapter),
        rank_pattern={module: own for module, own in ranks.items() if own != rank},
    )


def linear_shapes(model: Mapping[str, TensorMeta]) -> dict[str, tuple[int, ...]]:
    """Shape of every weight matrix of a native model, by module name."""
    return {
        name.removesuffix(".weight"): meta.shape
        for name, meta in model.items()
        if name.endswith(".weight") and len(meta.shape) == 2 and "tok_embeddings" not in name
    }


class MergedStateDict(LazyTensors):
    """The native weights of a model with its adapter folded in, computed when they are read.

    The base is never written to, and one merged tensor at a time exists.

    Args:
        base: native weights, without adapter tensors.
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.

    Raises:
        TensorMismatchError: if the adapter does not fit the base.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor] | TensorSource,
        adapter: Mapping[str, Tensor] | TensorSource,
        config: AdapterConfig,
    ) -> None:
        base_source, adapter_source = as_source(base), as_source(adapter)
        shapes = linear_shapes(base_source.metas)
        check_adapter(adapter_source.metas, config, shapes, "merging an adapter")
        compute = {name: partial(base_source.read, name) for name in base_source.metas}
        for module in adapter_modules(adapter_source.metas):
            compute[f"{module}.weight"] = partial(
                _read_merged, base_source, adapter_source, config, module
            )
        super().__init__(base_source.metas, compute)


def _read_merged(
    base: TensorSource, adapter: TensorSource, config: AdapterConfig, module: str
) -> Tensor:
    weight = base.read(f"{module}.weight")
    lora_a, lora_b = (
        adapter.read(f"{module}.{part.native}").to(weight.device) for part in (LORA_A, LORA_B)
    )
    magnitude = (
        adapter.read(f"{module}.{MAGNITUDE.native}").to(weight.device) if config.use_dora else None
    )
    return merged_weight(weight, lora_a, lora_b, config.scale(module), magnitude)
