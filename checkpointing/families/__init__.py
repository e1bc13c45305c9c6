"""The model families: one file of data each."""

from checkpointing.families.llama import LLAMA, MISTRAL
from checkpointing.mapping.family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL)}
"""By the ``model_type`` of the family's ``config.json``."""

MODEL_TYPES: dict[str, str] = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_1": "llama",
    "LLAMA3_2": "llama",
    "MISTRAL": "mistral",
}
"""torchtune's ModelType names, and the family that each stands for."""
