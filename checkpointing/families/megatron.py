"""Megatron-core's names and layout of decoders.

Names and the order of fused rows: Megatron-LM, ``megatron/core/models/gpt`` and
``megatron/core/transformer/attention.py``. Megatron rotates a head's first half against its second,
as Hugging Face does. What its implementations name otherwise, and what of a model one file holds,
is the business of ``formats/megatron_names.py`` and ``formats/megatron_shards.py``.
"""

from collections.abc import Iterable

from checkpointing.families.decoder import LAYER
from checkpointing.families.experts import ROUTER
from checkpointing.mapping.axis_ops import IDENTITY, AxisOp, RopeOrder
from checkpointing.mapping.rules import Rule, Tied

MEGATRON_LAYER = "decoder.layers.{layer}."
MEGATRON_PARTS = {
    "linear_qkv": ("adapter_q", "adapter_k", "adapter_v"),
    "linear_fc1": ("adapter_gate", "adapter_up"),
}
"""What adapters of the parts of a fused module are called (Megatron-Bridge's canonical LoRA)."""

_QKV = MEGATRON_LAYER + "self_attention.linear_qkv"
_EXPERT = MEGATRON_LAYER + "mlp.experts.local_experts.{expert}."


def _mlp(native: tuple[str, str, str], foreign: str) -> tuple[Rule, ...]:
    """A gated feed-forward layer: gate and up are one module.

    Args:
        native: names of the gate, down and up projection.
        foreign: what Megatron's names begin with.
    """
    gate, down, up = native
    return (
        Rule(gate, foreign + "linear_fc1", split=("out",), part=0),
        Rule(down, foreign + "linear_fc2", split=("in",)),
        Rule(up, foreign + "linear_fc1", split=("out",), part=1),
    )


MEGATRON_DENSE_MLP = _mlp(
    (LAYER + "mlp.w1", LAYER + "mlp.w2", LAYER + "mlp.w3"), MEGATRON_LAYER + "mlp."
)
MEGATRON_EXPERTS_MLP = (
    Rule(ROUTER.name, MEGATRON_LAYER + "mlp.router"),
    *_mlp(
        (
            LAYER + "mlp.experts.gate_proj",
            LAYER + "mlp.experts.down_proj",
            LAYER + "mlp.experts.up_proj",
        ),
        _EXPERT,
    ),
)


def megatron_rules(
    *,
    mlp: Iterable[Rule] = MEGATRON_DENSE_MLP,
    permuted: bool = False,
    qk_norm: bool = False,
) -> tuple[Rule | Tied, ...]:
    """The rules for Megatron-core's names.

    Args:
        mlp: rules for a layer's feed-forward.
        permuted: the native decoder rotates neighbouring pairs of a head, so rows of q and k move.
        qk_norm: queries and keys have norms.
    """
    rope: AxisOp = RopeOrder() if permuted else IDENTITY
    attention = LAYER + "attn."
    # The queries of a key-value head lie before it: [q q k v | q q k v].
    qkv = [
        Rule(attention + name, _QKV, out=op, split=("out",), part=part, groups="kv_heads")
        for part, (name, op) in enumerate(
            (("q_proj", rope), ("k_proj", rope), ("v_proj", IDENTITY))
        )
    ]
    foreign_attention = MEGATRON_LAYER + "self_attention."
    norms = [("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")] if qk_norm else []
    return (
        Rule("tok_embeddings", "embedding.word_embeddings", split=("in",)),
        *qkv,
        Rule(attention + "output_proj", foreign_attention + "linear_proj", split=("in",)),
        *(Rule(attention + native, foreign_attention + foreign) for native, foreign in norms),
        *mlp,
        Rule(LAYER + "sa_norm", MEGATRON_LAYER + "input_layernorm"),
        Rule(LAYER + "mlp_norm", MEGATRON_LAYER + "pre_mlp_layernorm"),
        Rule("norm", "decoder.final_layernorm"),
        Rule("output", "output_layer", split=("out",)),
        Tied("output", to="tok_embeddings", written=False),
    )
