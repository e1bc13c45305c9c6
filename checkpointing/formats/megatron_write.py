"""Writing the files of a Megatron checkpoint: a released one, which is of no iteration.

The directories and files are those that Megatron-LM reads with ``--ckpt-format torch``
(``megatron/training/checkpointing.py``).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from checkpointing.families import FAMILIES
from checkpointing.formats.megatron_files import RANK_FILE, RELEASE, TRACKER_NAME
from checkpointing.formats.megatron_names import stored_names
from checkpointing.formats.megatron_shards import Rank, shards
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.model_parallel import Parallel
from checkpointing.mapping.tensors import LazyTensors, TensorSource
from checkpointing.storage.torch_archive import TorchArchive
from checkpointing.storage.writer import CheckpointWriter

VOCAB_MULTIPLE = 128
"""Each rank's rows of the vocabulary are a multiple of it, if Megatron is not told another one."""
_VERSION = 3.0


def file_name(rank: Rank, parallel: Parallel) -> str:
    """The file of a rank."""
    return f"{RELEASE}/{_directory(rank, parallel)}/{RANK_FILE}"


def _directory(rank: Rank, parallel: Parallel) -> str:
    stage = f"_{rank.pipeline:03d}" if parallel.pipeline > 1 else ""
    expert = f"_{rank.expert:03d}" if parallel.expert > 1 else ""
    return f"mp_rank_{rank.tensor:02d}{stage}{expert}"


def write_ranks(
    writer: CheckpointWriter, source: TensorSource, config: ModelConfig, parallel: Parallel
) -> None:
    """Writes the files of all ranks, and the one that names the directory that they are in.

    Args:
        writer: of the directory.
        source: whole tensors of a model, or of an adapter, by the rules' names.
        config: the model's.
        parallel: into how many parts it is cut.
    """
    iteration = writer.within(RELEASE)
    family = FAMILIES[config.family]
    parts = shards(source, family, config.dims, parallel, VOCAB_MULTIPLE)
    settings = _settings(config, parallel)
    for rank, part in parts.items():
        stored = stored_names(part.metas)
        metas = {new: part.metas[name] for name, new in stored.items()}
        rows = {new: partial(part.rows, name) for name, new in stored.items()}
        # Known by where they stand in the file, and without data.
        places = {name: torch.empty(0, device="meta") for name in metas}
        content = {
            "model": places,
            "args": settings,
            "checkpoint_version": _VERSION,
            "iteration": 0,
        }
        name_of = {id(place): name for name, place in places.items()}
        archive = TorchArchive(metas, content=content, name_of=name_of)
        directory = iteration.within(_directory(rank, parallel))
        directory.torch_archive(RANK_FILE, archive, LazyTensors(metas, rows))
    writer.text(TRACKER_NAME, RELEASE)


def _settings(config: ModelConfig, parallel: Parallel) -> Mapping[str, Any]:
    """What of Megatron's arguments the model and its shards tell."""
    dims = config.dims
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "ffn_hidden_size": dims.ffn,
        "num_attention_heads": dims.heads,
        "group_query_attention": dims.kv_heads != dims.heads,
        "num_query_groups": dims.kv_heads,
        "kv_channels": dims.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
        "padded_vocab_size": dims.vocab + -dims.vocab % (VOCAB_MULTIPLE * parallel.tensor),
        "untie_embeddings_and_output_weights": not dims.tied,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_theta,
        "rotary_interleaved": False,
        "normalization": "RMSNorm",
        "norm_epsilon": config.norm_eps,
        "swiglu": config.activation == "silu",
        "add_bias_linear": dims.mlp_bias,
        "add_qkv_bias": dims.attention_bias,
        "num_experts": dims.experts or None,
    }
