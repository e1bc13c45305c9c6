"""The formats: how a model lies on disk."""

from checkpointing.formats.base import Format, OpenModel, WriteOptions
from checkpointing.formats.hf import HFFormat
from checkpointing.formats.megatron import MegatronFormat
from checkpointing.formats.meta import MetaFormat
from checkpointing.formats.tune import TuneFormat

__all__ = [
    "Format",
    "HFFormat",
    "MegatronFormat",
    "MetaFormat",
    "OpenModel",
    "TuneFormat",
    "WriteOptions",
]
