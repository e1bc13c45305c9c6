"""Exact, crash-safe checkpoints for fine-tuning language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointing.adapters import AdapterConfig, MergedStateDict, merged_weight
    from checkpointing.async_save import AsyncCheckpointer
    from checkpointing.checkpointers import (
        FullModelHFCheckpointer,
        FullModelMetaCheckpointer,
        FullModelTorchTuneCheckpointer,
    )
    from checkpointing.distributed_checkpointer import DistributedCheckpointer
    from checkpointing.errors import CheckpointingError
    from checkpointing.mapping.model_config import ModelConfig
    from checkpointing.retention import Retention

__all__ = [
    "AdapterConfig",
    "AsyncCheckpointer",
    "CheckpointingError",
    "DistributedCheckpointer",
    "FullModelHFCheckpointer",
    "FullModelMetaCheckpointer",
    "FullModelTorchTuneCheckpointer",
    "MergedStateDict",
    "ModelConfig",
    "Retention",
    "merged_weight",
]

_HOMES = {
    "AdapterConfig": "checkpointing.adapters",
    "AsyncCheckpointer": "checkpointing.async_save",
    "CheckpointingError": "checkpointing.errors",
    "DistributedCheckpointer": "checkpointing.distributed_checkpointer",
    "FullModelHFCheckpointer": "checkpointing.checkpointers",
    "FullModelMetaCheckpointer": "checkpointing.checkpointers",
    "FullModelTorchTuneCheckpointer": "checkpointing.checkpointers",
    "MergedStateDict": "checkpointing.adapters",
    "ModelConfig": "checkpointing.mapping.model_config",
    "Retention": "checkpointing.retention",
    "merged_weight": "checkpointing.adapters",
}


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: `tune ls` and its like must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
