"""A tiny model of transformers for every family that is mapped and has no native decoder."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MllamaConfig,
    MllamaForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Every size differs from every other.
LLAMA4 = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 9,
    **SPECIAL_IDS,
}
TEXT = {
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "cross_attention_layers": [1, 4],
    **SPECIAL_IDS,
}
VISION = {
    "hidden_size": 12,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 2,
    "num_channels": 5,
    "image_size": 21,
    "patch_size": 7,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 36,
}
CLIP = {
    "vocab_size": 131,
    "hidden_size": 42,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 23,
    **SPECIAL_IDS,
}
T5 = {
    "vocab_size": 131,
    "d_model": 42,
    "d_kv": 14,
    "d_ff": 56,
    "num_layers": 3,
    "num_heads": 6,
    "relative_attention_num_buckets": 10,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

# As the release of Llama 3.2 Vision has them, and others in which more tiles have no image.
SHAPES_OF_THREE = [[1, 1], [1, 2], [1, 3], [3, 1]]


def _llama4(**changed: object) -> nn.Module:
    return Llama4ForCausalLM(Llama4TextConfig(**{**LLAMA4, **changed}))


def _mllama(text: dict[str, object] | None = None, **vision: object) -> nn.Module:
    config = MllamaConfig(text_config={**TEXT, **(text or {})}, vision_config={**VISION, **vision})
    return MllamaForConditionalGeneration(config)


VARIANTS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "llama4": ("llama4_text", _llama4),
    "llama4, biases": ("llama4_text", lambda: _llama4(attention_bias=True)),
    "llama4, tied": ("llama4_text", lambda: _llama4(tie_word_embeddings=True)),
    "llama4, experts in every layer": (
        "llama4_text",
        lambda: _llama4(interleave_moe_layer_step=1),
    ),
    "llama4, experts in layers that are named": (
        "llama4_text",
        lambda: _llama4(moe_layers=[0, 3]),
    ),
    "mllama": ("mllama", _mllama),
    "mllama, cross-attention at no interval, other tiles": (
        "mllama",
        lambda: _mllama(
            {"cross_attention_layers": [0, 3], "num_hidden_layers": 5},
            max_num_tiles=3,
            supported_aspect_ratios=SHAPES_OF_THREE,
        ),
    ),
    "mllama, as torchtune can build it": (
        "mllama",
        lambda: _mllama(intermediate_size=4 * VISION["hidden_size"]),
    ),
    "clip_text_model": ("clip_text_model", lambda: CLIPTextModel(CLIPTextConfig(**CLIP))),
    "t5": ("t5", lambda: T5EncoderModel(T5Config(**T5))),
}

WEIGHTS_ONLY = {family for family, _ in VARIANTS.values()}
"""The families that have no native decoder."""


def peer(name: str, seed: int = 7) -> nn.Module:
    """The model in transformers, with random weights in fp32; nothing in it is zero or one."""
    torch.manual_seed(seed)
    model = VARIANTS[name][1]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_scale = "norm" in parameter_name and parameter_name.endswith("weight")
            parameter.copy_(is_scale + 0.2 * torch.randn_like(parameter))
        for table, tokens in tile_tables(model):
            config = model.config.vision_config
            tiles, width = config.max_num_tiles, config.hidden_size
            grid = torch.randn(tiles, tiles, tokens, width)
            table.copy_(listed(grid, config.supported_aspect_ratios))
    return model.float().eval()


def tile_tables(model: nn.Module) -> list[tuple[Tensor, int]]:
    """The tables of embeddings of tiles, and how many a tile has in each."""
    if model.config.model_type != "mllama":
        return []
    vision = model.model.vision_model
    return [
        (vision.pre_tile_positional_embedding.embedding.weight, 1),
        (vision.post_tile_positional_embedding.embedding.weight, 1),
        (vision.gated_positional_embedding.tile_embedding.weight, vision.num_patches),
    ]


def listed(grid: Tensor, shapes: list[list[int]]) -> Tensor:
    """A grid of tiles as transformers made its tables of Meta's, tile by tile.

    Args:
        grid: ``[rows, columns, tokens, width]``.
        shapes: rows and columns of each shape of an image.

    Returns:
        ``[1 + shapes, tiles * tokens * width]``.
    """
    tiles, _, tokens, width = grid.shape
    lists = torch.zeros(len(shapes) + 1, tiles, tokens, width, dtype=grid.dtype)
    for number, (rows, columns) in enumerate(shapes):
        for row in range(rows):
            for column in range(columns):
                lists[number + 1, row * columns + column] = grid[row, column]
    return lists.reshape(len(shapes) + 1, -1)


def write(name: str, directory: Path) -> nn.Module:
    """The model, saved in a directory as in a release: CLIP's names have a prefix there."""
    model = peer(name)
    model.save_pretrained(directory)
    if VARIANTS[name][0] == "clip_text_model":
        as_released(directory / "model.safetensors")
        model = CLIPTextModel.from_pretrained(directory).eval()
    return model


def as_released(file: Path) -> None:
    """Gives the names of a CLIP text encoder the prefix that they have in all releases."""
    tensors = load_file(file)
    prefixed = {f"text_model.{name.removeprefix('text_model.')}": t for name, t in tensors.items()}
    save_file(prefixed, file, metadata={"format": "pt"})


def inputs(name: str) -> dict[str, Tensor]:
    """What the model computes from: tokens, and for mllama an image of two tiles."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 131, (2, 19), generator=generator)
    if VARIANTS[name][0] != "mllama":
        return {"input_ids": tokens}
    tiles = 3 if "other tiles" in name else 4
    side, channels = VISION["image_size"], VISION["num_channels"]
    pixels = torch.randn(2, 1, tiles, channels, side, side, generator=generator)
    seen = torch.tensor([[1, 1, *[0] * (tiles - 2)]] * 2)[:, None]
    return {
        "input_ids": tokens,
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.tensor([[2], [2]]),
        "aspect_ratio_mask": seen,
        "cross_attention_mask": seen[:, None].expand(2, 19, 1, tiles),
    }


def output(model: nn.Module, name: str) -> Tensor:
    """Logits, or an encoder's last hidden state."""
    with torch.inference_mode():
        return model(**inputs(name))[0]
