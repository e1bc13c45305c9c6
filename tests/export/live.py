"""Live native models with adapters in which nothing is zero."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.nf4 import NF4Rounding
from checkpointing.training import (
    TransformerDecoder,
    adapter_state_dict,
    add_adapter,
    build_decoder,
)
from checkpointing.training.quantize import quantize_base
from tests.tiny import ATTENTION, EXPERTS, MLP, targets_of

ALL = (*ATTENTION, *MLP, *EXPERTS)
KINDS = {
    "lora": AdapterConfig(4, 6, ALL),
    "rslora, patterns": AdapterConfig(
        4,
        6,
        ("q_proj", "v_proj", "w2"),
        use_rslora=True,
        rank_pattern={"layers.1.attn.v_proj": 3},
        alpha_pattern={"layers.2.attn.q_proj": 11},
    ),
    "dora": AdapterConfig(4, 6, ALL, use_dora=True),
    "modules trained whole": AdapterConfig(
        4, 6, ("q_proj", "k_proj"), modules_to_save=("norm", "output_proj")
    ),
}


def config_for(dims, config: AdapterConfig) -> AdapterConfig:
    """The adapter, on those of its modules that a model has and that can carry it."""
    targets = targets_of(dims, config.target_modules)
    if config.use_dora:
        targets = tuple(target for target in targets if target not in EXPERTS)
    if dims.experts:
        # PEFT leaves dense layers beside those with experts out.
        targets = tuple(target for target in targets if target not in MLP)
    patterns = {
        name: {k: v for k, v in getattr(config, name).items() if k.rpartition(".")[2] in targets}
        for name in ("rank_pattern", "alpha_pattern")
    }
    return replace(config, target_modules=targets, **patterns)


def shake(model: TransformerDecoder, seed: int = 5) -> None:
    """Gives the adapter random values, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in adapter_state_dict(model).items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("magnitude"):
                tensor.copy_(0.5 + noise.abs())
            elif "lora_" in name:
                tensor.copy_(0.1 * noise)
            else:
                tensor.add_(0.1 * noise)


def live_model(
    directory: Path,
    variant: str = "llama",
    config: AdapterConfig = KINDS["lora"],
    dtype: torch.dtype = torch.float32,
) -> TransformerDecoder:
    """A model whose base is written to a directory, in Hugging Face's format."""
    # Imported here: it needs transformers, which a process that only loads does without.
    from tests.families.variants import write

    write(variant, directory)
    return loaded_model(directory, config, dtype)


def loaded_model(
    directory: Path, config: AdapterConfig, dtype: torch.dtype = torch.float32
) -> TransformerDecoder:
    """The same, of a base that lies there already."""
    checkpointer = FullModelHFCheckpointer(directory)
    weights = checkpointer.load_checkpoint()["model"]
    model = build_decoder(checkpointer.model_config, weights, dtype)
    add_adapter(model, config_for(model.config.dims, config))
    shake(model)
    return model.eval()


def nf4_model(directory: Path, targets: tuple[str, ...]) -> TransformerDecoder:
    """The same with a base in NF4."""
    from tests.families.variants import write

    write("llama", directory)
    checkpointer = FullModelHFCheckpointer(directory)
    weights = checkpointer.load_checkpoint()["model"]
    model = build_decoder(checkpointer.model_config, weights, torch.float32)
    quantize_base(model, NF4Rounding(torch.float32), "cpu")
    add_adapter(model, AdapterConfig(4, 6, targets))
    shake(model)
    return model.eval()


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def snapshot(model: TransformerDecoder) -> Mapping[str, bytes]:
    """The bytes of all of a model's parameters and buffers."""
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}
