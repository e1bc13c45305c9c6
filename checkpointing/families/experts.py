"""Modules and names of mixture-of-experts layers."""

from dataclasses import replace

from checkpointing.families.decoder import LAYER
from checkpointing.mapping.rules import Rule, experts, linear

ROUTER = replace(linear(LAYER + "mlp.router.gate", "experts", "hidden"), layers="expert_layers")

EXPERTS_MLP = (
    ROUTER,
    experts(LAYER + "mlp.experts.gate_proj", "expert_ffn", "hidden"),
    experts(LAYER + "mlp.experts.down_proj", "hidden", "expert_ffn"),
    experts(LAYER + "mlp.experts.up_proj", "expert_ffn", "hidden"),
)


def hf_experts(block: str, gate: str, down: str, up: str) -> tuple[Rule, ...]:
    """The rules for experts that are stored one by one.

    Args:
        block: name of a layer's mixture of experts.
        gate: last name of an expert's gate projection.
        down: last name of its down projection.
        up: last name of its up projection.
    """
    expert = block + ".experts.{expert}."
    return (
        Rule(ROUTER.name, block + ".gate"),
        Rule(LAYER + "mlp.experts.gate_proj", expert + gate),
        Rule(LAYER + "mlp.experts.down_proj", expert + down),
        Rule(LAYER + "mlp.experts.up_proj", expert + up),
    )
