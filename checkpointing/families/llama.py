"""Llama 2, 3, 3.1 and 3.2, SmolLM2 and all else that config.json calls ``llama``; Mistral."""

from dataclasses import replace

from checkpointing.families.decoder import (
    FUSED_IN_ENGINES,
    HF_DEFAULTS,
    decoder_modules,
    hf_rules,
)
from checkpointing.families.megatron import megatron_rules
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import Dropped, Rule, Tied

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
    modules=decoder_modules(),
    formats={
        "hf": hf_rules(permuted=True),
        "meta": META,
        "megatron": megatron_rules(permuted=True),
    },
    hf_defaults=HF_DEFAULTS,
    fused_in_engines=FUSED_IN_ENGINES,
)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    hf_defaults={
        **HF_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
