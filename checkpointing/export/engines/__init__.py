"""Engines that compute with the weights of a model that is trained elsewhere."""

from checkpointing.export.engines.base import Completion, RolloutEngine, Sampling, sync

__all__ = ["Completion", "RolloutEngine", "Sampling", "sync"]
