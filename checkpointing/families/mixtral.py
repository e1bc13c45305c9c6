"""Mixtral: Mistral with a mixture of experts in every layer."""

from checkpointing.families.decoder import FUSED_IN_ENGINES, HF_LAYER, decoder_modules, hf_rules
from checkpointing.families.experts import EXPERTS_MLP, ROUTER, hf_experts
from checkpointing.families.llama import MISTRAL
from checkpointing.families.megatron import MEGATRON_EXPERTS_MLP, megatron_rules
from checkpointing.mapping.family import Family

MIXTRAL = Family(
    name="mixtral",
    modules=decoder_modules(mlp=EXPERTS_MLP),
    formats={
        "hf": hf_rules(
            mlp=hf_experts(HF_LAYER + "block_sparse_moe", gate="w1", down="w2", up="w3"),
            permuted=True,
        ),
        "megatron": megatron_rules(mlp=MEGATRON_EXPERTS_MLP, permuted=True),
    },
    hf_defaults={
        **MISTRAL.hf_defaults,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_jitter_noise": 0.0,
    },
    hf_fields={
        "experts": ("num_local_experts", "num_experts"),
        "expert_ffn": ("intermediate_size",),
    },
    bare_in_transformers=(ROUTER.name,),
    renamed_in_transformers={"block_sparse_moe": "mlp"},
    fused_in_engines=FUSED_IN_ENGINES,
)
