"""What torchtune's recipes hand to a checkpointer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from checkpointing import AdapterConfig
from tests.peers.models import Base
from tests.peers.torchtune_process import Torchtune
from tests.tiny import random_adapter

RANK, ALPHA = 5, 12


def adapter_state(
    torchtune: Torchtune,
    checkpointer: str,
    base: Base,
    targets: Sequence[str],
    use_dora: bool = False,
) -> dict[str, Any]:
    """The state dict of the LoRA recipe, with merged weights and the four keys of its config."""
    config = AdapterConfig(RANK, ALPHA, tuple(targets), use_dora=use_dora)
    adapter = random_adapter(base.model.dims, config)
    weights = torchtune.load(checkpointer, **base.arguments(base.directory.parent / "unused"))
    return {
        "model": torchtune.merge(weights["model"], adapter, RANK, ALPHA),
        "adapter": adapter,
        "adapter_config": {
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": list(targets),
            "peft_type": "LORA",
        },
        "epochs_run": 1,
        "seed": 17,
    }


def recipe_state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What is kept besides the weights, after a step of the optimizer."""
    parameters = [tensor.clone().requires_grad_() for tensor in tensors.values()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    torch.stack([parameter.square().sum() for parameter in parameters]).sum().backward()
    optimizer.step()
    return {
        "optimizer": optimizer.state_dict(),
        "seed": 17,
        "epochs_run": 1,
        "total_epochs": 3,
        "max_steps_per_epoch": None,
    }
