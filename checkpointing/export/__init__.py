"""Weights for a rollout engine: streams of merged weights and of adapters, and the engines."""

from checkpointing.export.in_place import merged
from checkpointing.export.stream import WeightStream
from checkpointing.export.weights import adapter_stream, merged_stream

__all__ = ["WeightStream", "adapter_stream", "merged", "merged_stream"]
