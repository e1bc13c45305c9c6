"""QLoRA (Dettmers et al. 2023): the frozen base of an adapter run in NF4."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from checkpointing.errors import ConfigError
from checkpointing.nf4 import QUANTIZED_BASE_KEY, NF4Rounding, check_shapes, is_quantized
from checkpointing.storage.tensor_classes import stored_bytes
from checkpointing.training.decoder import TransformerDecoder


def base_rounding(
    model: Mapping[str, Any], dtype: torch.dtype, state: Mapping[str, Any]
) -> NF4Rounding | None:
    """How the ``model`` section of a recipe's config wants the base rounded; ``None``: not at all.

    Args:
        model: ``quantize_base`` (False) is read.
        dtype: of the run.
        state: as a checkpointer loaded it. A run that is resumed must keep its rounding, since an
            adapter makes up for the errors of just the base that it was trained on.

    Raises:
        ConfigError: if the run that is resumed rounded its base otherwise.
    """
    rounding = NF4Rounding(dtype) if model.get("quantize_base", False) else None
    was, now = state.get(QUANTIZED_BASE_KEY), None if rounding is None else rounding.to_state()
    if "steps_run" in state and was != now:
        raise ConfigError(
            "the run that is resumed was trained on another base: "
            f"{_words(was)} then, and {_words(now)} now. Set model.quantize_base and dtype back, "
            "or start afresh in another output_dir from checkpointer.adapter_checkpoint"
        )
    return rounding


def _words(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "model.quantize_base=False"
    return f"model.quantize_base=True ({state['quantization']} of {state['dtype']})"


def quantize_base(
    model: TransformerDecoder, rounding: NF4Rounding, device: torch.device | str
) -> None:
    """Rounds the linear weights of a decoder's layers to NF4, and moves all of it to a device.

    The weights are moved one by one, so that the device never holds the model as it was. A linear
    layer dequantises its weight for each pass, and keeps only the NF4 one for the backward pass.

    Args:
        model: of the rounding's dtype, with its weights loaded and no adapter yet.
        rounding: how to round.
        device: where to train.

    Raises:
        TensorMismatchError: lists the weights that cannot be rounded; nothing is changed.
        ConfigError: if torchao is not installed, or has no NF4 any more.
    """
    check_shapes({name: tuple(p.shape) for name, p in model.named_parameters()})
    before = after = others = 0
    for name, parameter in list(model.named_parameters()):
        tensor = parameter.detach().to(device)
        if is_quantized(name, tensor.shape):
            tensor = rounding.quantized(tensor)
            before += stored_bytes(parameter)
            after += stored_bytes(tensor)
        else:
            others += stored_bytes(tensor)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.Parameter(tensor, requires_grad=False))
    print(
        f"base: linear weights of the layers in NF4, {after / 1e9:.3g} GB instead of "
        f"{before / 1e9:.3g}; {others / 1e9:.3g} GB of other weights stay as they are. The adapter "
        "is trained on these rounded weights, and the merged model is made of them."
    )
