"""The model families: one file of data each."""

from checkpointing.families.gemma import GEMMA, GEMMA2
from checkpointing.families.llama import LLAMA, MISTRAL
from checkpointing.families.olmo2 import OLMO2
from checkpointing.families.phi3 import PHI3
from checkpointing.families.qwen import QWEN2, QWEN3
from checkpointing.families.smollm3 import SMOLLM3
from checkpointing.mapping.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, OLMO2, PHI3, SMOLLM3)
}
"""By the ``model_type`` of the family's ``config.json``."""

MODEL_TYPES: dict[str, str] = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_1": "llama",
    "LLAMA3_2": "llama",
    "MISTRAL": "mistral",
    "QWEN2": "qwen2",
    "QWEN3": "qwen3",
    "GEMMA": "gemma",
    "GEMMA2": "gemma2",
    "OLMO2": "olmo2",
    "PHI3_MINI": "phi3",
    "PHI4": "phi3",
    "SMOLLM3": "smollm3",
}
"""torchtune's ModelType names and ours, and the family that each stands for."""
