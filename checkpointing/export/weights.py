"""What can be streamed to an engine: merged weights and adapters, live or from directories."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.peft import PeftAdapter, to_peft
from checkpointing.adapters.peft_whole import CLASSIFIER
from checkpointing.convert import plan_conversion
from checkpointing.convert_adapter import plan_adapter_conversion
from checkpointing.errors import ConfigError
from checkpointing.export.stream import Content, WeightStream
from checkpointing.export.together import Together
from checkpointing.families import FAMILIES
from checkpointing.formats.base import OpenModel, layout_of, plan_foreign
from checkpointing.mapping.tensors import LazyTensors, TensorSource, as_source, cast
from checkpointing.mapping.ties import tied_names
from checkpointing.merge import MeasuredMerge, plan_merge
from checkpointing.nf4 import PEFT_NOTE, dequantized, is_nf4
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.lora import adapter_state_dict, base_state_dict

_HF = "hf"
# One row in so many of a large weight is measured.
_SAMPLED = 32


def merged_stream(
    model: TransformerDecoder | str | Path,
    adapter: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    expected: Mapping[str, Sequence[int]] | None = None,
    tied_head: bool = False,
    version: int = 0,
    digests: bool = True,
    to_ranks: Collection[int] | None = None,
) -> WeightStream:
    """The whole model with its adapter folded in, by Hugging Face's names.

    The model is never written to: each weight is ``W + s B A`` (DoRA: with its magnitudes) in fp32,
    rounded once. A base in NF4 gives the numbers that it stands for.

    A model that lies in shards in the processes of a job (``DTensor``, as FSDP2 makes them) is
    streamed by all of them together: each must call this, and read the stream to its end. Each
    computes what it has a part of, and no process holds more than a few tensors beside that.

    Args:
        model: a native model, with or without an adapter; or the directory or URL of one in any
            format.
        adapter: for a directory: a checkpoint of an adapter run, or a PEFT adapter.
        dtype: of the floating point tensors; by default that of the model's.
        expected: shape of each tensor that the engine has, by name; checked before the first one.
        tied_head: hand out the head of a model with tied embeddings too, for engines that keep a
            copy of it.
        version: number of these weights.
        digests: take a checksum of each tensor.
        to_ranks: of several processes, those that get the tensors, such as ``[0]``; for the others
            the same stream has none. By default all get all.

    Returns:
        The stream. All that can be wrong is found before it is returned.

    Raises:
        ConfigError: if an argument is wrong or another one in another process, or the adapter is
            of another base.
        TensorMismatchError: lists all tensors that do not fit the model, or the engine.
        CheckpointNotFoundError: if there is no model or no adapter.
    """
    together = Together(model, to_ranks)
    with together.agreed():
        if isinstance(model, TransformerDecoder) and adapter is not None:
            raise ConfigError(
                "adapter: a live model has its own adapter; give it for a directory only"
            )
        arguments = {"dtype": dtype, "tied_head": tied_head, "version": version}
        together.check_alike("merged_stream", arguments)
        content, family = together.plan(lambda: _merged(model, adapter, dtype))
        if tied_head:
            content = _with_tied_head(content, family)
        stream = together.stream(content, version, digests)
        if expected is not None:
            stream.check_expected(expected, "the engine")
    return stream


def adapter_stream(
    model: TransformerDecoder | str | Path,
    base: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    form: str = "portable",
    version: int = 0,
    digests: bool = True,
    to_ranks: Collection[int] | None = None,
) -> WeightStream:
    """The adapter alone, as PEFT stores it; the stream's ``adapter_config`` is PEFT's config.

    Args:
        model: a native model with an adapter; or a checkpoint of an adapter run, or a PEFT adapter.
        base: repository or directory of the base, for PEFT's config; an adapter on disk may tell
            it itself.
        dtype: of the tensors; by default the adapter's own.
        form: ``"portable"``, which engines compute rightly, or ``"exact"``.
        version: number of these weights.
        digests: take a checksum of each tensor.
        to_ranks: as for :func:`merged_stream`.

    Returns:
        The stream. All that can be wrong is found before it is returned.

    Raises:
        ConfigError: if there is no adapter, or PEFT has no form for it.
        TensorMismatchError: lists all tensors of the adapter that do not fit its base.
        CheckpointNotFoundError: if there is no adapter or no base.
    """
    together = Together(model, to_ranks)
    with together.agreed():
        arguments = {"base": str(base), "dtype": dtype, "form": form, "version": version}
        together.check_alike("adapter_stream", arguments)
        content = together.plan(lambda: _adapter(model, base, dtype, form))
        return together.stream(content, version, digests)


def _adapter(
    model: TransformerDecoder | str | Path,
    base: str | Path | None,
    dtype: torch.dtype | None,
    form: str,
) -> Content:
    device = torch.device("cpu")
    live: tuple[Tensor, ...] = ()
    if isinstance(model, TransformerDecoder):
        adapter = adapter_state_dict(model)
        peft = _peft_live(model, adapter, base, form)
        live = tuple(adapter.values())
        notes = (*peft.notes, *([PEFT_NOTE] if _is_in_nf4(model) else []))
        device = _device_of(model)
    else:
        plan = plan_adapter_conversion(model, "peft", base, form)
        assert plan.peft is not None  # it is what was asked for
        peft, notes = plan.peft, plan.notes
    source = peft.tensors if dtype is None else cast(peft.tensors, dtype)
    return Content("adapter", source, device, peft.config, notes, live=live)


def merged_source(model: TransformerDecoder) -> tuple[TensorSource, MeasuredMerge | None]:
    """The native weights of a live model with its adapter folded in, and what measures that."""
    base = dequantized(base_state_dict(model))
    adapter = adapter_state_dict(model)
    if not adapter:
        return base, None
    merged = MeasuredMerge(base, as_source(adapter), config_of(model), _SAMPLED)
    return merged, merged


def config_of(model: TransformerDecoder) -> AdapterConfig:
    """The hyper-parameters of a live model's adapter.

    Raises:
        ConfigError: if it has none.
    """
    if model.adapter_config is None:
        raise ConfigError("the model has no adapter: add one with add_adapter")
    return model.adapter_config


def _merged(
    model: TransformerDecoder | str | Path, adapter: str | Path | None, dtype: torch.dtype | None
) -> tuple[Content, str]:
    """What is streamed, and the model's family."""
    if isinstance(model, TransformerDecoder):
        return _merged_live(model, dtype), model.config.family
    return _merged_on_disk(model, adapter, dtype)


def _merged_live(model: TransformerDecoder, dtype: torch.dtype | None) -> Content:
    native, measured = merged_source(model)
    foreign = plan_foreign(native, _opened(model), _HF)
    source = foreign if dtype is None else cast(foreign, dtype)
    live = tuple(model.parameters())
    return Content("merged", source, _device_of(model), measured=measured, live=live)


def _merged_on_disk(
    model: str | Path, adapter: str | Path | None, dtype: torch.dtype | None
) -> tuple[Content, str]:
    measured = None
    if adapter is None:
        plan = plan_conversion(model, _HF)
    else:
        merge = plan_merge(model, adapter, _HF)
        plan, measured = merge.plan, merge.merged
    source = plan.tensors if dtype is None else cast(plan.tensors, dtype)
    family = plan.facts["family"]
    content = Content("merged", source, torch.device("cpu"), notes=plan.notes, measured=measured)
    return content, family


def _peft_live(
    model: TransformerDecoder, adapter: Mapping[str, Tensor], base: str | Path | None, form: str
) -> PeftAdapter:
    if base is None:
        raise ConfigError(
            "base: give the repository or directory of the model's base, which PEFT's config names"
        )
    layout = layout_of(model.config.family, _HF, model.config.dims)
    # Of no other base are the weights needed.
    has_head = layout.family.task_type == CLASSIFIER
    native = dequantized(base_state_dict(model)) if has_head else None
    return to_peft(as_source(adapter), config_of(model), layout, str(base), form, native)


def _is_in_nf4(model: nn.Module) -> bool:
    # Not by `parameters`, which takes ten times as long beside its walk through the modules.
    return any(
        is_nf4(p)
        for module in model.modules()
        for p in module._parameters.values()
        if p is not None
    )


def _opened(model: TransformerDecoder) -> OpenModel:
    return OpenModel(dequantized(base_state_dict(model)), model.config)


def _with_tied_head(content: Content, family: str) -> Content:
    """The same, and the head that an engine keeps as a copy of the embedding."""
    head, embedding = tied_names(FAMILIES[family], _HF)
    source = content.source
    if not head or head in source.metas:
        return content
    metas = {**source.metas, head: source.metas[embedding]}
    rows = {name: partial(source.rows, name) for name in source.metas}
    rows[head] = partial(source.rows, embedding)
    return replace(content, source=LazyTensors(metas, rows))


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
