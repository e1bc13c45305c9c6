"""Sizes of models of every family, drawn at random, and native tensors of such sizes."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from checkpointing.families.clip_text import ClipTextDims
from checkpointing.families.llama3_vision import VisionDims
from checkpointing.families.t5_encoder import T5Dims
from checkpointing.mapping.layout import Layout
from checkpointing.mapping.model_config import Dims

SIZES = st.integers(2, 9)
COUNTS = st.integers(1, 3)


def some(numbers):
    """Some of the numbers, in order."""
    return st.sets(st.sampled_from(numbers)).map(lambda chosen: tuple(sorted(chosen)))


@st.composite
def decoder_sizes(draw):
    kv_heads = draw(COUNTS)
    return {
        "layers": draw(st.integers(1, 2)),
        "vocab": draw(SIZES),
        "hidden": draw(SIZES),
        "ffn": draw(SIZES),
        "heads": kv_heads * draw(COUNTS),
        "kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 4)),
    }


@st.composite
def decoder_dims(draw):
    sizes = draw(decoder_sizes())
    return Dims(
        **sizes,
        tied=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        experts=draw(COUNTS),
        expert_ffn=draw(SIZES),
        shared_ffn=draw(SIZES),
        labels=draw(COUNTS),
        expert_layers=draw(some(range(sizes["layers"]))),
    )


@st.composite
def vision_dims(draw):
    sizes = draw(decoder_sizes())
    # Each is followed by a layer with self-attention, as the reader of config.json sees to.
    before = draw(some(range(sizes["layers"])))
    tiles = draw(COUNTS)
    shapes = [(rows, columns) for rows in range(1, 4) for columns in range(1, 4)]
    fitting = [shape for shape in shapes if shape[0] * shape[1] <= tiles]
    return VisionDims(
        **sizes,
        cross_attention_layers=tuple(layer + count for count, layer in enumerate(before)),
        special_tokens=draw(COUNTS),
        vision_layers=draw(COUNTS),
        global_layers=draw(COUNTS),
        vision_hidden=draw(SIZES),
        vision_ffn=draw(SIZES),
        vision_features=draw(SIZES),
        channels=draw(COUNTS),
        patch=draw(COUNTS),
        tokens=draw(COUNTS),
        tiles=tiles,
        aspect_ratios=draw(some(fitting)),
    )


_OF_FAMILY = {
    "mllama": vision_dims(),
    "clip_text_model": st.builds(
        lambda sizes, positions: ClipTextDims(**sizes, positions=positions), decoder_sizes(), SIZES
    ),
    "t5": st.builds(
        lambda sizes, buckets: T5Dims(**sizes, buckets=buckets), decoder_sizes(), SIZES
    ),
}


def dims_of(family: str) -> st.SearchStrategy[Dims]:
    """Sizes of models of a family."""
    return _OF_FAMILY.get(family, decoder_dims())


def random_tensors(layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random native tensors of a model; zero for tiles that no image has, as they must be."""
    tensors = {name: torch.randn(shape) for name, shape in layout.native_shapes().items()}
    for pair, parameter in layout.parameters():
        if parameter.recast is not None:
            tensor = tensors[parameter.native_name(pair.native)]
            shown = torch.zeros(tensor.shape[:2], dtype=torch.bool)
            for rows, columns in layout.dims.aspect_ratios:
                shown[:rows, :columns] = True
            tensor[~shown] = 0.0
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
