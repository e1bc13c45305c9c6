"""Adapters: their hyper-parameters, their arithmetic, and PEFT's directories."""

from checkpointing.adapters.config import AdapterConfig
from checkpointing.adapters.lora import MergedStateDict, merged_weight

__all__ = ["AdapterConfig", "MergedStateDict", "merged_weight"]
