"""The text models of Llama 4, whose experts are stacked in Hugging Face's layout too.

Native names are torchtune's (its main branch; release 0.6.1 has no Llama 4), without the
``decoder.`` that they have there beside a vision encoder.
"""

from dataclasses import replace

from checkpointing.families.decoder import (
    HF_DEFAULTS,
    HF_LAYER,
    LAYER,
    decoder_modules,
    dense_mlp,
    hf_rules,
)
from checkpointing.families.experts import ROUTER
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Module, Parameter, Rule, linear

_PACKED = Parameter("", "", ("expert", "in", "out"))
_EXPERTS = LAYER + "mlp.experts."
_SHARED = LAYER + "mlp.shared_expert."
_HF_MLP = HF_LAYER + "feed_forward."

_MLP = (
    *dense_mlp("dense_layers"),
    ROUTER,
    Module(_EXPERTS + "gate_proj", "expert_ffn", "hidden", (_PACKED,), layers="expert_layers"),
    Module(_EXPERTS + "up_proj", "expert_ffn", "hidden", (_PACKED,), layers="expert_layers"),
    Module(_EXPERTS + "down_proj", "hidden", "expert_ffn", (_PACKED,), layers="expert_layers"),
    *(
        replace(module, layers="expert_layers")
        for module in (
            linear(_SHARED + "w1", "shared_ffn", "hidden"),
            linear(_SHARED + "w2", "hidden", "shared_ffn"),
            linear(_SHARED + "w3", "shared_ffn", "hidden"),
        )
    ),
)

_HF_RULES = (
    Rule(LAYER + "mlp.w1", _HF_MLP + "gate_proj"),
    Rule(LAYER + "mlp.w2", _HF_MLP + "down_proj"),
    Rule(LAYER + "mlp.w3", _HF_MLP + "up_proj"),
    Rule(ROUTER.name, _HF_MLP + "router"),
    Rule(_EXPERTS + "gate_proj", _HF_MLP + "experts.gate_up_proj", part=0),
    Rule(_EXPERTS + "up_proj", _HF_MLP + "experts.gate_up_proj", part=1),
    Rule(_EXPERTS + "down_proj", _HF_MLP + "experts.down_proj"),
    Rule(_SHARED + "w1", _HF_MLP + "shared_expert.gate_proj"),
    Rule(_SHARED + "w2", _HF_MLP + "shared_expert.down_proj"),
    Rule(_SHARED + "w3", _HF_MLP + "shared_expert.up_proj"),
)

LLAMA4 = Family(
    name="llama4_text",
    modules=decoder_modules(mlp=_MLP),
    formats={"hf": hf_rules(mlp=_HF_RULES)},
    hf_defaults={
        **HF_DEFAULTS,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
    },
    fused_in_engines=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
    # Both rotate neighbouring pairs, as Meta's code does.
    hf_rotates_halves=False,
    hf_class="Llama4ForCausalLM",
)
