"""Modules and names that most decoders share; a family says what differs."""

from collections.abc import Iterable
from dataclasses import replace

from checkpointing.mapping.axis_ops import IDENTITY, AxisOp, RopeOrder
from checkpointing.mapping.rules import Dropped, Module, Rule, Tied, embedding, linear, norm

LAYER = "layers.{layer}."
HF_LAYER = "model.layers.{layer}."

PRE_NORMS = {
    "sa_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Native and Hugging Face names of the norms of a layer, as Llama has them."""


def dense_mlp(layers: str = "all_layers") -> tuple[Module, ...]:
    """A gated feed-forward layer.

    Args:
        layers: field of ``Dims`` with the numbers of the layers that have it.
    """
    mlp = LAYER + "mlp."
    return tuple(
        replace(module, layers=layers)
        for module in (
            linear(mlp + "w1", "ffn", "hidden", bias="mlp_bias"),
            linear(mlp + "w2", "hidden", "ffn", bias="mlp_bias"),
            linear(mlp + "w3", "ffn", "hidden", bias="mlp_bias"),
        )
    )


HF_DENSE_MLP = (
    Rule(LAYER + "mlp.w1", HF_LAYER + "mlp.gate_proj"),
    Rule(LAYER + "mlp.w2", HF_LAYER + "mlp.down_proj"),
    Rule(LAYER + "mlp.w3", HF_LAYER + "mlp.up_proj"),
)


def decoder_modules(
    *,
    mlp: Iterable[Module] | None = None,
    norms: Iterable[str] = PRE_NORMS,
    qkv_bias: str = "attention_bias",
    output_bias: str = "attention_bias",
    query_norm: str = "",
    key_norm: str = "",
) -> tuple[Module, ...]:
    """The native modules of a decoder.

    Args:
        mlp: of a layer's feed-forward; by default a dense one.
        norms: native names of the norms of a layer.
        qkv_bias: field of ``Dims`` that says whether q, k and v have biases.
        output_bias: the same for the attention's output projection; empty for never.
        query_norm: field of ``Dims`` with the size of the norm of the queries; empty for none.
        key_norm: the same for the keys.
    """
    qk_norms = (("q_norm", query_norm), ("k_norm", key_norm))
    return (
        embedding("tok_embeddings", "vocab", "hidden"),
        linear(LAYER + "attn.q_proj", "query", "hidden", bias=qkv_bias),
        linear(LAYER + "attn.k_proj", "key_value", "hidden", bias=qkv_bias),
        linear(LAYER + "attn.v_proj", "key_value", "hidden", bias=qkv_bias),
        linear(LAYER + "attn.output_proj", "hidden", "query", bias=output_bias),
        *(norm(f"{LAYER}attn.{name}", size) for name, size in qk_norms if size),
        *(dense_mlp() if mlp is None else mlp),
        *(norm(LAYER + name, "hidden") for name in norms),
        norm("norm", "hidden"),
        linear("output", "vocab", "hidden"),
    )


def hf_rules(
    *,
    mlp: Iterable[Rule] = HF_DENSE_MLP,
    norms: dict[str, str] = PRE_NORMS,
    permuted: bool = False,
    qk_norm: bool = False,
) -> tuple[Rule | Tied | Dropped, ...]:
    """The rules for Hugging Face's names.

    Args:
        mlp: rules for a layer's feed-forward.
        norms: native and Hugging Face names of the norms of a layer.
        permuted: the native decoder rotates neighbouring pairs of a head, so rows of q and k move.
        qk_norm: queries and keys have norms.
    """
    rope: AxisOp = RopeOrder() if permuted else IDENTITY
    attention = HF_LAYER + "self_attn."
    return (
        Rule("tok_embeddings", "model.embed_tokens"),
        Rule(LAYER + "attn.q_proj", attention + "q_proj", out=rope),
        Rule(LAYER + "attn.k_proj", attention + "k_proj", out=rope),
        Rule(LAYER + "attn.v_proj", attention + "v_proj"),
        Rule(LAYER + "attn.output_proj", attention + "o_proj"),
        *(Rule(f"{LAYER}attn.{n}", attention + n) for n in ("q_norm", "k_norm") if qk_norm),
        *mlp,
        *(Rule(LAYER + native, HF_LAYER + foreign) for native, foreign in norms.items()),
        Rule("norm", "model.norm"),
        Rule("output", "lm_head"),
        Tied("output", to="tok_embeddings", written=False),
        Dropped(attention + "rotary_emb.inv_freq"),
        Dropped("model.rotary_emb.inv_freq"),
    )


HF_DEFAULTS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
"""What transformers takes for fields that config.json lacks, as for Llama."""

FUSED_IN_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("w1", "w3"),
    ("gate_proj", "up_proj", "down_proj"),
)
