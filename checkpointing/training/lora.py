"""LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024) on the modules of the native decoder."""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import (
    EMBEDDING,
    TIED_EMBEDDING,
    adapter_modules,
    trained_tensors,
)
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.families import FAMILIES
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.nearest import hint
from checkpointing.storage.local_part import copy_part, whole
from checkpointing.training.adapter_switch import Switched
from checkpointing.training.decoder import RMSNorm, TransformerDecoder
from checkpointing.training.lora_embedding import DoRAEmbedding, LoRAEmbedding
from checkpointing.training.moe import ExpertsAdapter, GroupedExperts, LoRAGroupedExperts
from checkpointing.training.whole_modules import (
    start_copies,
    tensors_of_base,
    train_whole,
    trained_copies,
)

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "output_proj")
EXPERTS_MODULES = ("gate_proj", "up_proj", "down_proj")


class LoRALinear(Switched, nn.Module):
    """A frozen linear layer with a trained low-rank update: ``W x + scale * B A x``.

    ``A`` and ``B`` are fp32 whatever the dtype of ``W``, so that small steps of the optimizer are
    not lost; they are cast to the dtype of ``x`` to be multiplied with it. ``A`` starts random and
    ``B`` at zero, so that the update starts at zero.

    Args:
        base: its weight ``[out, in]`` and bias are taken over and frozen.
        rank: rows of ``A [rank, in]`` and columns of ``B [out, rank]``.
        scale: factor of the update.
        dropout: probability of dropping an input element of ``A`` in training.
        lora_bias: a bias ``[out]`` is trained with ``B``, and scaled like it.
    """

    def __init__(
        self, base: nn.Linear, rank: int, scale: float, dropout: float, lora_bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = base.weight.requires_grad_(False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a, self.lora_b = _fresh_pair(
            base.in_features, rank, base.out_features, lora_bias, base.weight.device
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., in]`` to ``[..., out]``; keeps the dtype."""
        result = F.linear(x, self.weight, self.bias)
        return result + self._update(self.dropout(x)) if self.adapter_is_on else result

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's own parameters, by their names in this module."""
        yield "lora_a.weight", self.lora_a.weight
        yield "lora_b.weight", self.lora_b.weight
        if self.lora_b.bias is not None:
            yield "lora_b.bias", self.lora_b.bias

    def fresh_values(self) -> dict[str, Tensor]:
        """What :meth:`adapter_parameters` start as, whole, drawn anew as the constructor draws."""
        a, b = self.lora_a, self.lora_b
        a, b = _fresh_pair(
            a.in_features, a.out_features, b.out_features, b.bias is not None, a.weight.device
        )
        values = {"lora_a.weight": a.weight, "lora_b.weight": b.weight}
        return values if b.bias is None else {**values, "lora_b.bias": b.bias}

    def _update(self, x: Tensor) -> Tensor:
        down = F.linear(x, self.lora_a.weight.type_as(x))
        bias = None if self.lora_b.bias is None else self.lora_b.bias.type_as(x)
        return self.scale * F.linear(down, self.lora_b.weight.type_as(x), bias)


class DoRALinear(LoRALinear):
    """A frozen linear layer whose direction and row norms are trained apart.

    ``m * (W + scale * B A) / ||W + scale * B A|| x`` with the norm of each output row. The norm is
    a constant to the gradient (section 4.3 of the paper). With dropout only the change that the
    adapter makes sees the dropped input, as in PEFT.

    Args:
        base: as for :class:`LoRALinear`; its row norms are the first magnitudes ``m [out]``.
        rank: as for :class:`LoRALinear`.
        scale: as for :class:`LoRALinear`.
        dropout: as for :class:`LoRALinear`.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        super().__init__(base, rank, scale, dropout)
        self.magnitude = nn.Parameter(_row_norms_of(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., in]`` to ``[..., out]``; keeps the dtype."""
        if not self.adapter_is_on:
            return F.linear(x, self.weight, self.bias)
        ratio = (self.magnitude / self._row_norms()).type_as(x)
        if self.training and self.dropout.p > 0:
            dropped = self.dropout(x)
            change = (ratio - 1) * F.linear(dropped, self.weight) + ratio * self._update(dropped)
            return F.linear(x, self.weight, self.bias) + change
        result = ratio * (F.linear(x, self.weight) + self._update(x))
        return result if self.bias is None else result + self.bias

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's own parameters, by their names in this module."""
        yield from super().adapter_parameters()
        yield "magnitude", self.magnitude

    def fresh_values(self) -> dict[str, Tensor]:
        """What :meth:`adapter_parameters` start as, whole; all ranks must call this together."""
        return {**super().fresh_values(), "magnitude": _row_norms_of(whole(self.weight))}

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        update = self.lora_b.weight @ self.lora_a.weight
        return torch.add(self.weight.to(torch.float32), update, alpha=self.scale).norm(dim=1)


def _fresh_pair(
    in_: int, rank: int, out: int, lora_bias: bool, device: torch.device
) -> tuple[nn.Linear, nn.Linear]:
    """A and B as they start."""
    own: dict[str, Any] = {"device": device, "dtype": torch.float32}
    a = nn.Linear(in_, rank, bias=False, **own)
    b = nn.Linear(rank, out, bias=lora_bias, **own)
    nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
    nn.init.zeros_(b.weight)
    if lora_bias:
        nn.init.zeros_(b.bias)
    return a, b


def _row_norms_of(weight: Tensor) -> Tensor:
    # `to` with a dtype also dequantises an NF4 weight; `float` on one of fp32 does not.
    return weight.detach().to(torch.float32).norm(dim=1)


def add_adapter(
    model: TransformerDecoder, config: AdapterConfig, like: Mapping[str, Tensor] | None = None
) -> None:
    """Freezes a decoder and puts a fresh adapter on its target modules, in place.

    Args:
        model: with its weights loaded.
        config: target modules, rank, scale, dropout, the kind of adapter, and which modules are
            trained whole.
        like: tensors of an adapter that is to be loaded, which may have been trained on some of
            the layers only; just its modules get one. By default every target module does.

    Raises:
        ConfigError: if a target, a module to save or a name in a pattern is none of the model's,
            or cannot be trained so.
    """
    plain = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    grouped = {n: m for n, m in model.named_modules() if isinstance(m, GroupedExperts)}
    experts = {f"{name}.{last}" for name in grouped for last in EXPERTS_MODULES}
    _check_targets(model, config, plain.keys() | experts)
    trained = _whole_modules(model, config)
    carrying = {
        name for name in plain.keys() | experts if name.rpartition(".")[2] in config.target_modules
    }
    if both := sorted(carrying & trained.keys()):
        raise ConfigError(
            f"{', '.join(both)}: to get an adapter and to be trained whole; it can be only one, so "
            "take it out of model.modules_to_save, or give its kind no adapter"
        )
    if like is not None:
        carrying &= set(adapter_modules(like))
        named = trained_tensors(like)
        trained = {name: module for name, module in trained.items() if name in named}
    model.requires_grad_(False)
    for name, base in plain.items():
        if name in carrying:
            model.set_submodule(name, _adapted(base, name, config))
    for name, experts_of_layer in grouped.items():
        adapters = {
            last: ExpertsAdapter(config.rank(f"{name}.{last}"), config.scale(f"{name}.{last}"))
            for last in EXPERTS_MODULES
            if f"{name}.{last}" in carrying
        }
        if adapters:
            adapted = LoRAGroupedExperts(experts_of_layer, adapters, config.dropout)
            model.set_submodule(name, adapted)
    for module in trained.values():
        train_whole(module)
    model.adapter_config = config


def _adapted(base: nn.Linear | nn.Embedding, name: str, config: AdapterConfig) -> nn.Module:
    rank, scale = config.rank(name), config.scale(name)
    if isinstance(base, nn.Embedding):
        return (DoRAEmbedding if config.use_dora else LoRAEmbedding)(base, rank, scale)
    if config.use_dora:
        return DoRALinear(base, rank, scale, config.dropout)
    return LoRALinear(base, rank, scale, config.dropout, config.lora_bias)


def _whole_modules(model: TransformerDecoder, config: AdapterConfig) -> dict[str, nn.Module]:
    """The modules that are trained whole, by full name."""
    possible = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | RMSNorm)
    }
    if model.output is None and "output" in config.modules_to_save:
        raise ConfigError(
            "`output` in model.modules_to_save: this model's output projection is its token "
            f"embedding; name {EMBEDDING}, and both are trained as one"
        )
    known = {*possible, *(name.rpartition(".")[2] for name in possible)}
    for name in config.modules_to_save:
        _check_name(name, known, "name in model.modules_to_save:")
    return {name: module for name, module in possible.items() if config.saves(name)}


def _check_targets(model: TransformerDecoder, config: AdapterConfig, possible: Set[str]) -> None:
    if "output" in config.target_modules and model.output is None:
        raise ConfigError(
            "an adapter on `output` is not possible: this model's output projection is tied to "
            "its token embedding; set model.apply_lora_to_output=False"
        )
    if EMBEDDING in config.target_modules and model.output is None:
        raise ConfigError(
            f"an adapter on `{EMBEDDING}` is not possible: {TIED_EMBEDDING}; set "
            "model.apply_lora_to_embeddings=False"
        )
    known = {name.rpartition(".")[2] for name in possible}
    for target in config.target_modules:
        _check_name(target, known, "lora target")
    if config.use_dora and set(config.target_modules) & set(EXPERTS_MODULES):
        raise ConfigError(
            "there is no DoRA for experts, neither here nor in PEFT: set model.use_dora=False, or "
            "model.apply_lora_to_mlp=False"
        )
    if config.lora_bias and (
        unbiased := set(config.target_modules) & {EMBEDDING, *EXPERTS_MODULES}
    ):
        raise ConfigError(
            f"there is no lora_bias for embeddings and experts ({', '.join(sorted(unbiased))}), "
            "neither here nor in PEFT: set model.lora_bias=False, or give them no adapter"
        )
    adapted = {name for name in possible if name.rpartition(".")[2] in config.target_modules}
    for name in (*config.rank_pattern, *config.alpha_pattern):
        _check_name(name, adapted, "module in rank_pattern or alpha_pattern")


def _check_name(name: str, known: set[str], what: str) -> None:
    if name not in known:
        names = f" (of {', '.join(sorted(known))})" if len(known) <= 10 else ""
        raise ConfigError(f"unknown {what} {name!r}; {hint(name, known)}{names}")


def init_adapter(model: TransformerDecoder) -> None:
    """Gives an adapter the values that :func:`add_adapter` gives one where the weights are loaded.

    It is for a model that got its adapter, its memory and its weights in this order. The same is
    drawn, bit for bit, as for a model on one device: every rank draws the whole tensors of one
    module at a time, and keeps its part. All ranks must call this together.

    Args:
        model: with memory, its base loaded; its parameters may be cut (``DTensor``).
    """
    modules = list(model.modules())
    # In the order in which add_adapter draws: for experts last.
    for module in (
        *(each for each in modules if isinstance(each, LoRALinear | LoRAEmbedding)),
        *(each for each in modules if isinstance(each, LoRAGroupedExperts)),
    ):
        values = module.fresh_values()
        for name, parameter in module.adapter_parameters():
            copy_part(parameter, values[name], name)
    start_copies(model)


def _adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Walked through once: that takes milliseconds, at every sync of an engine.
    modules = dict(model.named_modules())
    yield from _update_parameters(modules)
    yield from trained_copies(modules)


def _update_parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Of the adapter, without what is trained whole."""
    for name, module in modules.items():
        if isinstance(module, LoRALinear | LoRAEmbedding | LoRAGroupedExperts):
            for own, parameter in module.adapter_parameters():
                yield f"{name}.{own}", parameter


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by native name; they share memory with the model.

    Those of modules that are trained whole are among them, by the names that the base's have.
    """
    return {name: parameter.detach() for name, parameter in _adapter_parameters(model)}


def base_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights without the adapter, by native name; they share memory with the model.

    Raises:
        ConfigError: if the adapter is folded into them just now.
    """
    if getattr(model, "is_merged", False):
        raise ConfigError(
            "the model is merged in place, so that its base is not at hand, and an adapter would "
            "be added twice: save, stream and merge outside of that block"
        )
    adapter = dict(_update_parameters(dict(model.named_modules())))
    return {name: tensor for name, tensor in tensors_of_base(model).items() if name not in adapter}


def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies a saved adapter into the model's.

    Args:
        model: its parameters may be cut (``DTensor``); then each rank takes its part.
        tensors: whole, by native name.

    Raises:
        TensorMismatchError: if tensors are missing, unexpected or misshapen; all in one error.
    """
    own = dict(_adapter_parameters(model))
    problems = [f"{name}: missing from the saved adapter" for name in own if name not in tensors]
    problems += [f"{name}: not in the adapter of this run" for name in tensors if name not in own]
    for name in own:
        if name in tensors and tensors[name].shape != own[name].shape:
            saved, here = list(tensors[name].shape), list(own[name].shape)
            problems.append(f"{name}: saved with shape {saved}, here {here}")
    if problems:
        raise TensorMismatchError(
            "the saved adapter does not fit the adapter of this run",
            problems,
            "Use the same settings in section `model` as the run that saved it.",
        )
    for name, parameter in own.items():
        copy_part(parameter, tensors[name], name)


def adapter_config_from_recipe(
    model: Mapping[str, Any], model_config: ModelConfig
) -> AdapterConfig:
    """The adapter that the ``model`` section of a recipe's config asks for.

    Args:
        model: ``lora_attn_modules`` (required), ``apply_lora_to_mlp`` (False),
            ``apply_lora_to_output`` (False), ``apply_lora_to_embeddings`` (False),
            ``modules_to_save`` (none), ``lora_rank`` (8), ``lora_alpha`` (16), ``lora_dropout``
            (0), ``lora_bias`` (False), ``use_dora`` (False), ``use_rslora`` (False).
            ``quantize_base`` is no matter of the adapter:
            :func:`checkpointing.training.quantize.base_rounding`.
        model_config: of the model, which tells what its feed-forward layers are made of.

    Raises:
        ConfigError: if a key is missing or unknown, or a value is not possible.
    """
    defaults = {
        "lora_attn_modules": None,
        "apply_lora_to_mlp": False,
        "apply_lora_to_output": False,
        "apply_lora_to_embeddings": False,
        "modules_to_save": (),
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_bias": False,
        "use_dora": False,
        "use_rslora": False,
        "quantize_base": False,
    }
    for key in model:
        _check_name(str(key), set(defaults), "key in section `model` of the config:")
    given = {**defaults, **{str(key): value for key, value in model.items()}}
    if given["lora_attn_modules"] is None:
        raise ConfigError(
            "model.lora_attn_modules is missing: list the attention projections that get an "
            f"adapter, of {list(ATTENTION_MODULES)}; an empty list for none"
        )
    attention = tuple(given["lora_attn_modules"])
    for name in attention:
        _check_name(name, set(ATTENTION_MODULES), "name in model.lora_attn_modules:")
    targets = attention
    targets += _mlp_modules(model_config) if given["apply_lora_to_mlp"] else ()
    targets += ("output",) if given["apply_lora_to_output"] else ()
    targets += (EMBEDDING,) if given["apply_lora_to_embeddings"] else ()
    if not targets:
        raise ConfigError("section `model` of the config: no module gets an adapter")
    if given["lora_rank"] < 1:
        raise ConfigError(f"model.lora_rank={given['lora_rank']}: must be at least 1")
    if not 0 <= (given["lora_dropout"] or 0) < 1:
        raise ConfigError(f"model.lora_dropout={given['lora_dropout']}: must be in [0, 1)")
    return AdapterConfig(
        r=given["lora_rank"],
        alpha=float(given["lora_alpha"]),
        target_modules=targets,
        dropout=float(given["lora_dropout"] or 0),
        use_dora=bool(given["use_dora"]),
        use_rslora=bool(given["use_rslora"]),
        modules_to_save=tuple(given["modules_to_save"] or ()),
        lora_bias=bool(given["lora_bias"]),
    )


def _mlp_modules(config: ModelConfig) -> tuple[str, ...]:
    """Last names of what an adapter on the feed-forward layers is on: dense ones and experts."""
    names = [
        module.name.rpartition(".")[2]
        for module in FAMILIES[config.family].modules
        if ".mlp." in module.name
        and ".router." not in module.name
        and module.adapter
        and getattr(config.dims, module.layers)
    ]
    return tuple(dict.fromkeys(names))


def check_same_adapter(saved: Mapping[str, Any], config: AdapterConfig) -> AdapterConfig:
    """Makes sure that this run means by a loaded adapter what the run that saved it meant.

    Only the dropout may differ: the others decide what the tensors stand for.

    Args:
        saved: the ``adapter_config`` of the state dict that was loaded.
        config: what the config of this run says, which has no words for rank and alpha patterns.

    Returns:
        This run's config, with the patterns of the loaded adapter.

    Raises:
        ConfigError: with each setting that differs.
    """
    was = AdapterConfig.from_state(saved)
    config = replace(config, rank_pattern=was.rank_pattern, alpha_pattern=was.alpha_pattern)
    old, own = was.to_state(), config.to_state()
    differing = [
        f"{key} was {old[key]!r} and is {value!r}"
        for key, value in own.items()
        if key != "lora_dropout" and not _same(old[key], value)
    ]
    if differing:
        raise ConfigError(
            "the adapter that is loaded was trained with other settings: "
            f"{'; '.join(differing)}. Set section `model` of the config to them, or start afresh "
            "in another output_dir"
        )
    return config


def _same(left: Any, right: Any) -> bool:
    """Equal; of lists of modules the order means nothing."""
    return sorted(left) == sorted(right) if isinstance(left, list) else bool(left == right)
