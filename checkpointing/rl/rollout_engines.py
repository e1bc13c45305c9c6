"""Rollout engines as components of a config."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.errors import ConfigError
from checkpointing.export.engines.transformers_engine import TransformersEngine
from checkpointing.storage.mirror import local
from checkpointing.training.settings import get_device, get_dtype

if TYPE_CHECKING:
    from checkpointing.export.engines.vllm_engine import VLLMEngine


def transformers_engine(
    checkpoint_dir: str | Path, dtype: str = "fp32", device: str = "cpu"
) -> TransformersEngine:
    """A model of transformers in the same process, beside the one that is trained.

    Args:
        checkpoint_dir: Hugging Face directory of the base, or its URL.
        dtype: that it computes in, ``fp32`` or ``bf16``.
        device: where it is.

    Raises:
        ConfigError: if transformers is not installed, or the dtype or device cannot be had.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            "this engine needs transformers: pip install 'tunepoint[hf]', or set another "
            "engine._component_"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(str(local(checkpoint_dir)), dtype=get_dtype(dtype))
    return TransformersEngine(model.to(get_device(device)))


def vllm_engine(
    checkpoint_dir: str | Path,
    dtype: str = "bf16",
    max_lora_rank: int | None = None,
    **options: Any,
) -> "VLLMEngine":
    """A ``vllm.LLM`` in the same process.

    Args:
        checkpoint_dir: Hugging Face directory of the base, or its URL.
        dtype: that it computes in, ``fp32`` or ``bf16``.
        max_lora_rank: of the adapters that it can take, for ``sync: adapter``; ``None``: merged
            weights only.
        **options: for ``vllm.LLM``, such as ``gpu_memory_utilization``.

    Raises:
        ConfigError: if vLLM is not installed, or cannot be used so.
    """
    from checkpointing.export.engines.vllm_engine import VLLMEngine

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"this engine needs vLLM, which cannot be imported ({error}): pip install vllm, or set "
            "another engine._component_"
        ) from error
    if max_lora_rank is not None:
        options |= {"enable_lora": True, "max_lora_rank": max_lora_rank}
    name = str(get_dtype(dtype)).removeprefix("torch.")
    return VLLMEngine(LLM(model=str(local(checkpoint_dir)), dtype=name, **options))
