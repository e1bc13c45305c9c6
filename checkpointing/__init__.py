"""Exact, crash-safe checkpoints for fine-tuning language models."""

from checkpointing.adapters import AdapterConfig, MergedStateDict, merged_weight
from checkpointing.checkpointers import (
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
)
from checkpointing.errors import CheckpointingError
from checkpointing.mapping.model_config import ModelConfig

__all__ = [
    "AdapterConfig",
    "CheckpointingError",
    "FullModelHFCheckpointer",
    "FullModelMetaCheckpointer",
    "FullModelTorchTuneCheckpointer",
    "MergedStateDict",
    "ModelConfig",
    "merged_weight",
]
