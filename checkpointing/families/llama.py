"""Llama 2, 3, 3.1 and 3.2, SmolLM2 and all else that config.json calls ``llama``; Mistral."""

from dataclasses import replace

from checkpointing.mapping.axis_ops import RopeOrder
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Dropped, Rule, Tied, embedding, linear, norm

MODULES = (
    embedding("tok_embeddings", "vocab", "hidden"),
    linear("layers.{layer}.attn.q_proj", "query", "hidden", bias="attention_bias"),
    linear("layers.{layer}.attn.k_proj", "key_value", "hidden", bias="attention_bias"),
    linear("layers.{layer}.attn.v_proj", "key_value", "hidden", bias="attention_bias"),
    linear("layers.{layer}.attn.output_proj", "hidden", "query", bias="attention_bias"),
    linear("layers.{layer}.mlp.w1", "ffn", "hidden", bias="mlp_bias"),
    linear("layers.{layer}.mlp.w2", "hidden", "ffn", bias="mlp_bias"),
    linear("layers.{layer}.mlp.w3", "ffn", "hidden", bias="mlp_bias"),
    norm("layers.{layer}.sa_norm", "hidden"),
    norm("layers.{layer}.mlp_norm", "hidden"),
    norm("norm", "hidden"),
    linear("output", "vocab", "hidden"),
)

HF_LAYER = "model.layers.{layer}."
HF = (
    Rule("tok_embeddings", "model.embed_tokens"),
    Rule("layers.{layer}.attn.q_proj", HF_LAYER + "self_attn.q_proj", out=RopeOrder("heads")),
    Rule("layers.{layer}.attn.k_proj", HF_LAYER + "self_attn.k_proj", out=RopeOrder("kv_heads")),
    Rule("layers.{layer}.attn.v_proj", HF_LAYER + "self_attn.v_proj"),
    Rule("layers.{layer}.attn.output_proj", HF_LAYER + "self_attn.o_proj"),
    Rule("layers.{layer}.mlp.w1", HF_LAYER + "mlp.gate_proj"),
    Rule("layers.{layer}.mlp.w2", HF_LAYER + "mlp.down_proj"),
    Rule("layers.{layer}.mlp.w3", HF_LAYER + "mlp.up_proj"),
    Rule("layers.{layer}.sa_norm", HF_LAYER + "input_layernorm"),
    Rule("layers.{layer}.mlp_norm", HF_LAYER + "post_attention_layernorm"),
    Rule("norm", "model.norm"),
    Rule("output", "lm_head"),
    Tied("output", to="tok_embeddings", written=False),
    Dropped(HF_LAYER + "self_attn.rotary_emb.inv_freq"),
    Dropped("model.rotary_emb.inv_freq"),
)

META = (
    # Llama 2 was sharded along the width of the embedding, Llama 3 along the vocabulary.
    Rule("tok_embeddings", "tok_embeddings", split=("out", "in")),
    Rule("layers.{layer}.attn.q_proj", "layers.{layer}.attention.wq", split=("out",)),
    Rule("layers.{layer}.attn.k_proj", "layers.{layer}.attention.wk", split=("out",)),
    Rule("layers.{layer}.attn.v_proj", "layers.{layer}.attention.wv", split=("out",)),
    Rule("layers.{layer}.attn.output_proj", "layers.{layer}.attention.wo", split=("in",)),
    Rule("layers.{layer}.mlp.w1", "layers.{layer}.feed_forward.w1", split=("out",)),
    Rule("layers.{layer}.mlp.w2", "layers.{layer}.feed_forward.w2", split=("in",)),
    Rule("layers.{layer}.mlp.w3", "layers.{layer}.feed_forward.w3", split=("out",)),
    Rule("layers.{layer}.sa_norm", "layers.{layer}.attention_norm"),
    Rule("layers.{layer}.mlp_norm", "layers.{layer}.ffn_norm"),
    Rule("norm", "norm"),
    Rule("output", "output", split=("out",)),
    Tied("output", to="tok_embeddings", written=True),
    Dropped("rope.freqs"),
)

LLAMA = Family(
    name="llama",
    modules=MODULES,
    formats={"hf": HF, "meta": META},
    hf_defaults={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    },
    fused_in_engines=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    hf_defaults={
        **LLAMA.hf_defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
