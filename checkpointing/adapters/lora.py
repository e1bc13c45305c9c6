"""The arithmetic of LoRA and DoRA on native tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.rules import (
    ADAPTER_KINDS,
    BIAS,
    EMBEDDING_ADAPTER,
    AdapterKind,
    Parameter,
)
from checkpointing.mapping.tensors import (
    LazyTensors,
    Rows,
    TensorMeta,
    TensorSource,
    as_source,
    shapes_of,
)

EMBEDDING = "tok_embeddings"
TIED_EMBEDDING = (
    "the output projection of this model is its token embedding, so that an adapter on one of them "
    "would tear them apart; train the embedding whole, with modules_to_save, or untie the model "
    "first"
)


def merged_weight(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """A weight with its adapter folded in, computed in fp32 (fp64 for fp64) and rounded once.

    LoRA (Hu et al. 2021): ``W + s B A``. DoRA (Liu et al. 2024): each output row of that, divided
    by its norm and multiplied with its magnitude.

    Args:
        weight: ``[..., out, in]``, of any floating dtype, which is also that of the result.
        lora_a: ``[..., r, in]``.
        lora_b: ``[..., out, r]``.
        scale: the factor s.
        magnitude: ``[..., out]``, for DoRA.

    Returns:
        A new tensor ``[..., out, in]``; the inputs are not changed.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return unrounded_merge(weight, lora_a, lora_b, scale, magnitude, dtype).to(weight.dtype)


def unrounded_merge(
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    magnitude: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As :func:`merged_weight`, in the dtype that is computed in."""
    merged = _product(lora_b.to(dtype), lora_a.to(dtype)).mul_(scale).add_(weight.to(dtype))
    if magnitude is not None:
        norms = torch.linalg.vector_norm(merged, dim=-1)
        merged *= (magnitude.to(dtype) / norms)[..., None]
    return merged


def _product(lora_b: Tensor, lora_a: Tensor) -> Tensor:
    """``B A``, of which each element has the same bits however many rows and columns there are.

    A weight is merged a few rows at a time, which are others where it lies in shards. With a single
    row or column, which is a vector, the sum over the rank would be taken in another order.
    """
    rows, columns = lora_b.shape[-2], lora_a.shape[-1]
    if rows == 1:
        lora_b = lora_b.expand(*lora_b.shape[:-2], 2, -1)
    if columns == 1:
        lora_a = lora_a.expand(*lora_a.shape[:-1], 2)
    return (lora_b @ lora_a)[..., :rows, :columns]


def adapter_modules(names: Iterable[str]) -> dict[str, AdapterKind]:
    """The modules that carry an adapter, by full native name, in the order given."""
    modules: dict[str, AdapterKind] = {}
    for name in names:
        found = _module_and_kind(name)
        if found is not None:
            modules[found[0]] = found[1]
    return modules


def trained_tensors(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors that are trained whole, beside the adapter, by full native name of the module."""
    modules: dict[str, list[str]] = {}
    for name in names:
        if _module_and_kind(name) is None:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    return modules


# The names of an adapter are asked for several times, at each sync of an engine.
@lru_cache(maxsize=1 << 14)
def _module_and_kind(name: str) -> tuple[str, AdapterKind] | None:
    for kind in ADAPTER_KINDS:
        for parameter in kind.parameters:
            if (module := parameter.module_of(name)) is not None:
                return module, kind
    return None


def check_adapter(
    adapter: Mapping[str, TensorMeta],
    config: AdapterConfig,
    base_shapes: Mapping[str, tuple[int, ...]],
    subject: str,
) -> None:
    """Checks that an adapter is whole and fits its base, before anything is done with it.

    Args:
        adapter: the native adapter tensors, and those of modules that are trained whole.
        config: its hyper-parameters.
        base_shapes: shape of every tensor of the base, by native name.
        subject: names the adapter in errors.

    Raises:
        TensorMismatchError: lists every tensor that is unknown, missing or misshaped.
    """
    problems = []
    modules = adapter_modules(adapter)
    for module, kind in modules.items():
        problems += _module_problems(module, kind, adapter, config, base_shapes)
    trained = trained_tensors(adapter)
    for module, names in trained.items():
        problems += _trained_problems(module, names, adapter, config, base_shapes)
        if module in modules:
            problems.append(f"{module}: is trained whole and has an adapter; it can be only one")
    for target in config.target_modules:
        if not any(module.rsplit(".", 1)[-1] == target for module in modules):
            problems.append(f"{target}: a target module of the adapter without any tensor")
    for saved in config.modules_to_save:
        if not any(saved in (module, module.rsplit(".", 1)[-1]) for module in trained):
            problems.append(f"{saved}: a module to save without any tensor")
    if problems:
        raise TensorMismatchError(
            subject,
            problems,
            "The adapter must be that of this base, with the same rank and target modules: check "
            "checkpoint_dir, adapter_checkpoint and the adapter's config.",
        )


def _module_problems(
    module: str,
    kind: AdapterKind,
    adapter: Mapping[str, TensorMeta],
    config: AdapterConfig,
    base_shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """What is wrong with the adapter of one module."""
    shape = base_shapes.get(kind.weight.native_name(module), ())
    is_embedding = module.rsplit(".", 1)[-1] == EMBEDDING
    if len(shape) != len(kind.weight.axes) or is_embedding != (kind is EMBEDDING_ADAPTER):
        what = "embedding" if kind is EMBEDDING_ADAPTER else "linear module"
        return [f"{module}: the base has no such {what}"]
    if is_embedding and "output.weight" not in base_shapes:
        return [f"{module}: {TIED_EMBEDDING}"]
    problems = []
    sizes = dict(zip(kind.weight.axes, shape, strict=True)) | {"rank": config.rank(module)}
    wanted = config.parameters(kind)
    for parameter in kind.parameters:
        name = parameter.native_name(module)
        expected = tuple(sizes[axis] for axis in parameter.axes)
        if parameter not in wanted:
            if name in adapter:
                what = "a DoRA magnitude" if parameter is kind.magnitude else "a bias of B"
                says = "plain LoRA" if parameter is kind.magnitude else "lora_bias=False"
                problems.append(f"{name}: {what}, but the adapter's config says {says}")
        elif name not in adapter:
            problems.append(f"{name}: missing, expected {list(expected)}")
        elif adapter[name].shape != expected:
            problems.append(f"{name}: {list(adapter[name].shape)}, expected {list(expected)}")
    if config.use_dora and kind.magnitude is None:
        problems.append(f"{module}: there is no DoRA for experts; use LoRA")
    if config.lora_bias and kind.bias is None:
        what = "embeddings" if is_embedding else "experts"
        problems.append(f"{module}: there is no lora_bias for {what}; leave it out")
    return problems


def _trained_problems(
    module: str,
    names: list[str],
    adapter: Mapping[str, TensorMeta],
    config: AdapterConfig,
    base_shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """What is wrong with a module that is trained whole."""
    own = {name: shape for name, shape in base_shapes.items() if name.rpartition(".")[0] == module}
    if not own or not config.saves(module):
        return [f"{name}: not a tensor of an adapter" for name in names]
    problems = [f"{name}: the base has no such tensor" for name in names if name not in own]
    for name, shape in own.items():
        if name not in adapter:
            problems.append(f"{name}: missing, expected {list(shape)}, since {module} is saved")
        elif adapter[name].shape != shape:
            problems.append(f"{name}: {list(adapter[name].shape)}, expected {list(shape)}")
    return problems


def config_of_tensors(adapter: Mapping[str, TensorMeta]) -> AdapterConfig:
    """The ranks, targets and kind of an adapter whose config is not known.

    The alpha, which tensors do not show, is set to the rank.
    """
    modules = adapter_modules(adapter)
    ranks = {
        module: meta.shape[kind.a.axes.index("rank")]
        for module, kind in modules.items()
        if (meta := adapter.get(kind.a.native_name(module))) is not None
        and len(meta.shape) == len(kind.a.axes)
    }
    rank = next(iter(ranks.values()), 1)
    return AdapterConfig(
        r=rank,
        alpha=rank,
        target_modules=tuple(dict.fromkeys(module.rsplit(".", 1)[-1] for module in modules)),
        use_dora=any(_has(adapter, module, kind.magnitude) for module, kind in modules.items()),
        rank_pattern={module: own for module, own in ranks.items() if own != rank},
        modules_to_save=tuple(trained_tensors(adapter)),
        lora_bias=any(_has(adapter, module, kind.bias) for module, kind in modules.items()),
    )


def _has(adapter: Mapping[str, TensorMeta], module: str, parameter: Parameter | None) -> bool:
    return parameter is not None and parameter.native_name(module) in adapter


def weight_updates(
    adapter: TensorSource, config: AdapterConfig
) -> tuple[LazyTensors, AdapterConfig]:
    """The part of an adapter that updates weights, without biases of B and what is trained whole.

    Args:
        adapter: native adapter tensors.
        config: the adapter's hyper-parameters.
    """
    config = replace(config, lora_bias=False, modules_to_save=())
    names = [
        parameter.native_name(module)
        for module, kind in adapter_modules(adapter.metas).items()
        for parameter in config.parameters(kind)
    ]
    metas = {name: adapter.metas[name] for name in names}
    return LazyTensors(metas, {name: partial(adapter.rows, name) for name in names}), config


class MergedStateDict(LazyTensors):
    """The native weights of a model with its adapter folded in, computed when they are read.

    Modules that were trained whole take the place of the base's, in the base's dtype. The base is
    never written to, and one merged tensor at a time exists. Of tensors that lie in shards in the
    processes of a job (``DTensor``), those that update weights are gathered at once, so that all
    processes must make it at the same time.

    Args:
        base: native weights, without adapter tensors.
        adapter: native adapter tensors, and those of modules that were trained whole.
        config: the adapter's hyper-parameters.

    Attributes:
        base: native weights, as a source.

    Raises:
        TensorMismatchError: if the adapter does not fit the base, or has biases for modules that
            have none.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor] | TensorSource,
        adapter: Mapping[str, Tensor] | TensorSource,
        config: AdapterConfig,
    ) -> None:
        base_source, adapter_source = as_source(base), as_source(adapter)
        self.base, self._adapter, self._config = base_source, adapter_source, config
        check_adapter(adapter_source.metas, config, shapes_of(base_source), "merging an adapter")
        self._whole = self._gathered_updates()
        rows: dict[str, Callable[[], Rows]] = {
            name: partial(base_source.rows, name) for name in base_source.metas
        }
        without_bias = []
        for module, kind in adapter_modules(adapter_source.metas).items():
            rows[kind.weight.native_name(module)] = partial(self._merged, module, kind)
            if config.lora_bias and kind.bias is not None:
                name = BIAS.native_name(module)
                without_bias += [module] if name not in rows else []
                rows[name] = partial(self._bias, name, kind.bias.native_name(module), module)
        if without_bias:
            raise TensorMismatchError(
                "merging an adapter with lora_bias",
                [f"{module}: has no bias that B's could be added to" for module in without_bias],
                "The merged model has no place for it: keep the adapter apart from its base "
                "(save_adapter_weights_only=True), or train without lora_bias.",
            )
        for names in trained_tensors(adapter_source.metas).values():
            rows |= {name: partial(self._trained, name) for name in names}
        super().__init__(base_source.metas, rows)

    def with_adapter(self, adapter: Mapping[str, Tensor]) -> "MergedStateDict":
        """The same base with other tensors of such an adapter, as a copy of them."""
        return MergedStateDict(self.base, adapter, self._config)

    def _gathered_updates(self) -> dict[str, Tensor]:
        """What updates weights, and lies in shards: each part of a weight needs others of it."""
        names = [
            parameter.native_name(module)
            for module, kind in adapter_modules(self._adapter.metas).items()
            for parameter in self._config.parameters(kind)
        ]
        sharded = [name for name in names if self._adapter.rows(name).shards is not None]
        return {name: self._adapter.read(name) for name in sharded}

    def _update(self, name: str) -> Tensor:
        return self._whole[name] if name in self._whole else self._adapter.read(name)

    def _merged(self, module: str, kind: AdapterKind) -> Rows:
        """A merged weight, a few rows at a time, unless each needs all of them."""
        axes = kind.weight.axes
        name = kind.weight.native_name(module)
        weight = self.base.rows(name)
        order = sorted(range(len(axes)), key=lambda dim: _MATRIX.index(axes[dim]))
        back = [order.index(dim) for dim in range(len(axes))]
        own = [kind.a, kind.b, *([kind.magnitude] if kind.magnitude is not None else [])]
        if not self._config.use_dora:
            own = own[:2]

        @cache
        def tensors() -> list[Tensor]:
            return [self._update(one.native_name(module)) for one in own]

        def merge(some: Tensor, start: int, stop: int) -> Tensor:
            parts = [
                _matrix(
                    _along(tensor, parameter.axes, axes[0], start, stop).to(some.device),
                    parameter.axes,
                )
                for parameter, tensor in zip(own, tensors(), strict=True)
            ]
            magnitude = parts[2] if len(parts) == 3 else None
            merged = self._merge(module, some.permute(order), parts[0], parts[1], magnitude)
            return merged.permute(back)

        # DoRA divides each output row by its norm.
        if self._config.use_dora and axes[0] == "in":
            shape = self.base.metas[name].shape
            return Rows.made_of([weight], shape, lambda all: merge(all[0], 0, weight.count))
        return weight.map_ranges(merge)

    def _merge(
        self, module: str, weight: Tensor, lora_a: Tensor, lora_b: Tensor, magnitude: Tensor | None
    ) -> Tensor:
        """:func:`merged_weight` of some rows of a module's weight."""
        return merged_weight(weight, lora_a, lora_b, self._config.scale(module), magnitude)

    def _bias(self, name: str, lora_bias: str, module: str) -> Rows:
        def add(bias: Tensor, start: int, stop: int) -> Tensor:
            dtype = torch.float64 if bias.dtype == torch.float64 else torch.float32
            update = self._update(lora_bias)[start:stop].to(bias.device, dtype)
            return (bias.to(dtype) + self._config.scale(module) * update).to(bias.dtype)

        return self.base.rows(name).map_ranges(add)

    def _trained(self, name: str) -> Rows:
        dtype = self.base.metas[name].dtype
        return self._adapter.rows(name).map(lambda rows: rows.to(dtype))


# Matrices of linear maps, perhaps one for each expert.
_MATRIX = ("expert", "out", "rank", "in")


def _along(tensor: Tensor, axes: tuple[str, ...], axis: str, start: int, stop: int) -> Tensor:
    """The range along an axis that a tensor may have; a view."""
    return tensor.narrow(axes.index(axis), start, stop - start) if axis in axes else tensor


def _matrix(tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: _MATRIX.index(axes[dim])))
