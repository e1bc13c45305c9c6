"""Merging a live model in place, for consumers that read its own parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from checkpointing.adapters.lora import adapter_modules
from checkpointing.errors import ConfigError
from checkpointing.export.together import is_in_shards
from checkpointing.export.weights import config_of, merged_source
from checkpointing.mapping.rules import BIAS
from checkpointing.training.adapter_switch import Switched
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.lora import adapter_state_dict


@contextmanager
def merged(model: TransformerDecoder) -> Iterator[TransformerDecoder]:
    """While the block runs, the model's weights have its adapter folded in.

    The weights are not computed back afterwards: the model gets the very parameters again that it
    had before, also if the block raises. So nothing drifts, however often this is done. It takes
    the memory of the merged weights; a stream (:func:`~checkpointing.export.merged_stream`) takes
    that of a few.

    Args:
        model: with an adapter, which is switched off in the block. Modules that are trained whole
            keep their trained weights.

    Raises:
        ConfigError: if the model has no adapter, is merged already, or lies in shards in the
            processes of a job.
    """
    config = config_of(model)
    if is_in_shards(model):
        raise ConfigError(
            "the model lies in shards (DTensor), each of which FSDP puts in the place of what is "
            "merged before a layer computes: compute with the adapter as it is, or give an engine "
            "merged_stream(model)"
        )
    carrying = adapter_modules(adapter_state_dict(model))
    adapted = [m for m in model.modules() if isinstance(m, Switched) and _has_adapter(m)]
    if not all(module.adapter_is_on for module in adapted):
        what = "is merged already" if model.is_merged else "has its adapter switched off"
        raise ConfigError(f"the model {what}: leave that block first")
    names = [kind.weight.native_name(module) for module, kind in carrying.items()]
    if config.lora_bias:
        names += [BIAS.native_name(module) for module in carrying]
    source, _ = merged_source(model)
    folded = {name: nn.Parameter(source.read(name), requires_grad=False) for name in names}
    before = {name: model.get_parameter(name) for name in names}
    try:
        model.is_merged = True
        _put(model, folded)
        for module in adapted:
            module.adapter_is_on = False
        yield model
    finally:
        model.is_merged = False
        _put(model, before)
        for module in adapted:
            module.adapter_is_on = True


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "adapter_parameters")


def _put(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, parameter)
