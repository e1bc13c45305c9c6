"""Runs in processes in which the real Megatron-core is: one rank of a model, on a CPU.

Takes a JSON file with what to do, and the number of the rank. Megatron-core wants a GPU in a few
places where it does not use one; these are told that there is none to wait for.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.device_count = lambda: 1

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

megatron_random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
moe_utils.te_general_gemm = None

# How the plain implementation calls what Transformer Engine has in its linear layers.
PLAIN = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
LAYOUTS: dict[str, dict[str, bool]] = {
    "stacked": {},
    "layers": {"non_homogeneous_layers": True},
    "singles": {"singleton_local_shards": True},
}


def make(settings: dict[str, Any], task: dict[str, Any]) -> GPTModel:
    """This rank's part of the model that the settings in a file tell of."""
    experts = settings["num_experts"]
    config = TransformerConfig(
        num_layers=settings["num_layers"],
        hidden_size=settings["hidden_size"],
        num_attention_heads=settings["num_attention_heads"],
        num_query_groups=settings["num_query_groups"],
        kv_channels=settings["kv_channels"],
        ffn_hidden_size=settings["ffn_hidden_size"],
        normalization=settings["normalization"],
        layernorm_epsilon=settings["norm_epsilon"],
        add_bias_linear=settings["add_bias_linear"],
        add_qkv_bias=settings["add_qkv_bias"],
        gated_linear_unit=settings["swiglu"],
        activation_func=torch.nn.functional.silu,
        qk_layernorm=task["qk_norm"],
        num_moe_experts=experts,
        moe_ffn_hidden_size=task["expert_ffn"],
        moe_router_topk=task["experts_per_token"],
        moe_token_dispatcher_type="allgather",
        moe_aux_loss_coeff=0.0,
        tensor_model_parallel_size=task["tensor"],
        pipeline_model_parallel_size=task["pipeline"],
        expert_model_parallel_size=task["expert"],
        expert_tensor_parallel_size=task["tensor"],
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        experts, moe_grouped_gemm=False, qk_layernorm=task["qk_norm"], normalization="RMSNorm"
    )
    return GPTModel(
        config,
        spec,
        vocab_size=settings["padded_vocab_size"],
        max_sequence_length=settings["max_position_embeddings"],
        position_embedding_type=settings["position_embedding_type"],
        rotary_base=settings["rotary_base"],
        share_embeddings_and_output_weights=not settings["untie_embeddings_and_output_weights"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).eval()


def main(file: str, rank: int) -> None:
    """Loads this rank's file, and writes what the task asks for."""
    task = json.loads(Path(file).read_text())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(task["world"])}
    store = dist.FileStore(task["store"], task["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task["world"])
    parallel_state.initialize_model_parallel(
        task["tensor"],
        task["pipeline"],
        expert_model_parallel_size=task["expert"],
        expert_tensor_parallel_size=task["tensor"],
    )
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if task["pipeline"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if task["expert"] > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    content = torch.load(Path(task["release"]) / name / "model_optim_rng.pt", weights_only=True)
    settings, weights = content["args"], {}
    for stored, tensor in content["model"].items():
        for fused, plain in PLAIN.items():
            stored = stored.replace(fused, plain)
        weights[stored] = tensor
    model = make(settings, task)
    own = {key for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert set(weights) == own, sorted(set(weights) ^ own)
    model.load_state_dict(weights, strict=False)
    if task["world"] == 1:
        tokens = torch.tensor(task["tokens"])
        length = tokens.shape[1]
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        positions = torch.arange(length)[None].expand_as(tokens)
        with torch.no_grad():
            torch.save(model(tokens, positions, hidden), task["logits"])
    args = argparse.Namespace(**settings, activation=print, config=model.config)
    by_rank = Path(task["by_rank"]) / name
    by_rank.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"model": model.state_dict(), "args": args, "rng_state": [{"odd": model.config}]},
        by_rank / "model_optim_rng.pt",
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for layout, flags in LAYOUTS.items():
        directory = Path(task["together"]) / layout
        directory.mkdir(parents=True, exist_ok=True)
        state = model.sharded_state_dict(metadata={**flags, "dp_cp_group": group})
        dist.barrier()
        dist_checkpointing.save(
            {"model": state, "args": args, "iteration": 7},
            str(directory),
            validate_access_integrity=False,
        )
    dist.barrier()
    # Its background processes would wait for others.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
