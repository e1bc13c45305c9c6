"""The model families: one file of data each."""

from checkpointing.families.classifier import classifier
from checkpointing.families.clip_text import CLIP_TEXT
from checkpointing.families.gemma import GEMMA, GEMMA2, GEMMA3
from checkpointing.families.llama import LLAMA, MISTRAL
from checkpointing.families.llama3_vision import LLAMA3_VISION
from checkpointing.families.llama4 import LLAMA4
from checkpointing.families.mixtral import MIXTRAL
from checkpointing.families.olmo2 import OLMO2
from checkpointing.families.phi3 import PHI3
from checkpointing.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from checkpointing.families.smollm3 import SMOLLM3
from checkpointing.families.t5_encoder import T5_ENCODER
from checkpointing.mapping.family import Family

_FAMILIES = (
    LLAMA,
    LLAMA4,
    LLAMA3_VISION,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OLMO2,
    PHI3,
    SMOLLM3,
    CLIP_TEXT,
    T5_ENCODER,
    *map(classifier, (LLAMA, MISTRAL, QWEN2, QWEN3)),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
"""By the ``model_type`` of the family's ``config.json``; of a classifier, with a suffix."""

MODEL_TYPES: dict[str, str] = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_1": "llama",
    "LLAMA3_2": "llama",
    "LLAMA3_VISION": "mllama",
    "LLAMA4": "llama4_text",
    "MISTRAL": "mistral",
    "MIXTRAL": "mixtral",
    "QWEN2": "qwen2",
    "QWEN3": "qwen3",
    "QWEN3_MOE": "qwen3_moe",
    "GEMMA": "gemma",
    "GEMMA2": "gemma2",
    "GEMMA3": "gemma3_text",
    "OLMO2": "olmo2",
    "PHI3_MINI": "phi3",
    "PHI4": "phi3",
    "SMOLLM3": "smollm3",
    "CLIP_TEXT": "clip_text_model",
    "T5_ENCODER": "t5",
}
"""torchtune's ModelType names and ours, and the family that each stands for."""
