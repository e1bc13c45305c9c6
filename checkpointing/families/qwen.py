"""Qwen 2 and 2.5, Qwen 3, and Qwen 3 with mixtures of experts."""

from checkpointing.families.decoder import (
    FUSED_IN_ENGINES,
    HF_DEFAULTS,
    HF_DENSE_MLP,
    HF_LAYER,
    decoder_modules,
    dense_mlp,
    hf_rules,
)
from checkpointing.families.experts import EXPERTS_MLP, ROUTER, hf_experts
from checkpointing.families.megatron import (
    MEGATRON_DENSE_MLP,
    MEGATRON_EXPERTS_MLP,
    megatron_rules,
)
from checkpointing.mapping.family import Family

_DEFAULTS = {
    **HF_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Family(
    name="qwen2",
    modules=decoder_modules(output_bias=""),
    formats={"hf": hf_rules(), "megatron": megatron_rules()},
    # Its q, k and v always have biases, and config.json does not say so.
    hf_defaults={**_DEFAULTS, "attention_bias": True},
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
)

QWEN3 = Family(
    name="qwen3",
    modules=decoder_modules(query_norm="head_dim", key_norm="head_dim"),
    formats={"hf": hf_rules(qk_norm=True), "megatron": megatron_rules(qk_norm=True)},
    hf_defaults={**_DEFAULTS, "head_dim": 128},
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    modules=decoder_modules(
        mlp=(*dense_mlp("dense_layers"), *EXPERTS_MLP), query_norm="head_dim", key_norm="head_dim"
    ),
    formats={
        "hf": hf_rules(
            mlp=(
                *HF_DENSE_MLP,
                *hf_experts(HF_LAYER + "mlp", gate="gate_proj", down="down_proj", up="up_proj"),
            ),
            qk_norm=True,
        ),
        "megatron": megatron_rules(mlp=(*MEGATRON_DENSE_MLP, *MEGATRON_EXPERTS_MLP), qk_norm=True),
    },
    hf_defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    hf_fields={
        # transformers 5 writes the second name.
        "experts": ("num_experts", "num_local_experts"),
        "expert_ffn": ("moe_intermediate_size",),
    },
    bare_in_transformers=(ROUTER.name,),
    fused_in_engines=FUSED_IN_ENGINES,
    rotates_halves=True,
)
