"""What a save will write, known and checked before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import config_of_tensors
from checkpointing.adapters.peft import PeftAdapter
from checkpointing.errors import ConfigError
from checkpointing.mapping.tensors import TensorSource, is_dtensor, meta_of
from checkpointing.storage.tensor_classes import stored_bytes

MODEL_KEY = "model"
ADAPTER_KEY = "adapter"
ADAPTER_CONFIG_KEY = "adapter_config"
# Of the recipe state: what the run is, of which the manifest tells the names.
RUN_KEY = "run"


@dataclass(frozen=True)
class SavePlan:
    """All that a save will write, checked.

    Attributes:
        model: the weights in the format of the checkpoint, or ``None`` to write none.
        adapter: native adapter tensors.
        adapter_config: the adapter's hyper-parameters, if known.
        peft: the adapter as PEFT stores it, for formats that do.
        recipe_state: all that is neither weights nor adapter.
    """

    model: TensorSource | None
    adapter: TensorSource | None
    adapter_config: AdapterConfig | None
    peft: PeftAdapter | None
    recipe_state: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        peft = None if self.peft is None else self.peft.tensors
        sources = [source for source in (self.model, self.adapter, peft) if source is not None]
        in_sources = sum(meta.nbytes for source in sources for meta in source.metas.values())
        return in_sources + _tensor_bytes(self.recipe_state)


@dataclass(frozen=True)
class SaveTimes:
    """What a save cost, in seconds.

    Attributes:
        blocked: that the trainer waited; of a save that is written in the background, for the copy
            and for the save before it.
        written: that the writing took in the background.
    """

    blocked: float
    written: float


def directory_name(prefix: str, epoch: int, step: int | None) -> str:
    """Name of a checkpoint's directory.

    Raises:
        ConfigError: if the prefix is unknown, or its number is not given.
    """
    numbers = {"epoch": epoch, "step": step}
    number = numbers.get(prefix)
    if number is None:
        raise ConfigError(
            f"dir_prefix {prefix!r} with step={step}: give 'epoch', or 'step' and the step's number"
        )
    return f"{prefix}_{number}"


def adapter_config_of(state_dict: Mapping[str, Any], adapter: TensorSource) -> AdapterConfig | None:
    """The ``adapter_config`` of a state dict, or ``None`` if it has none."""
    state = state_dict.get(ADAPTER_CONFIG_KEY)
    if state is None:
        return None
    config = AdapterConfig.from_state(state)
    if "use_dora" not in state:
        # torchtune's config does not say it; its tensors do.
        config = replace(config, use_dora=config_of_tensors(adapter.metas).use_dora)
    return config


def _tensor_bytes(value: object) -> int:
    if is_dtensor(value):
        return meta_of(value).nbytes
    if isinstance(value, Tensor):
        return stored_bytes(value)
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0
