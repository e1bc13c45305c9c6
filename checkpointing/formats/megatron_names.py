"""What Megatron-core's implementations of the same model name differently.

With Transformer Engine, a norm is part of the linear layer behind it, and the experts of a layer
are one module (``megatron/core/models/gpt/gpt_layer_specs.py``). The rules of the families have the
names of the plain implementation; written are those with Transformer Engine, which is the usual
one, but with a module for each expert, to which an adapter of its own can belong.
"""

import re
from collections.abc import Iterable, Iterator

# Wrappers of a model, and the module that an adapter wraps.
_WRAPPERS = re.compile(r"^(?:module\.)+|(?<=\.)to_wrap\.")
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_GROUPED_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)")
_LAYER = re.compile(r"(decoder\.layers\.)(\d{1,9})(\..+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.local_experts\.)(\d{1,9})(\..+)")
# State of Transformer Engine for 8-bit training, and tables that the config tells.
_NO_WEIGHTS = re.compile(r".*(?:_extra_state\d*|rotary_pos_emb\.inv_freq)")


def plain_name(name: str) -> str | None:
    """What the rules call a stored tensor; ``None`` for one that holds no weights."""
    name = _WRAPPERS.sub("", name)
    if _NO_WEIGHTS.fullmatch(name):
        return None
    for fused, plain in _NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    grouped = _GROUPED_EXPERT.fullmatch(name)
    if grouped is not None:
        return f"{grouped[1]}.local_experts.{grouped[3]}.{grouped[2]}.weight"
    return name


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """Under which name each of a model's tensors is written, by its name in the rules."""
    names = list(names)
    linears = {name.removesuffix("weight") for name in names if name.endswith(".weight")}
    return {name: _stored_name(name, linears) for name in names}


def _stored_name(name: str, linears: set[str]) -> str:
    for fused, plain in _NORMS.items():
        start = name.removesuffix(plain)
        # In front of experts, or of a part that is not there, there is nothing to fuse with.
        if start != name and start + fused.removesuffix("layer_norm_weight") in linears:
            return start + fused
    return name


def layer_of(name: str) -> int | None:
    """Number of the layer that a tensor belongs to; ``None`` if to none."""
    match = _LAYER.fullmatch(name)
    return None if match is None else int(match[2])


def in_layer(name: str, layer: int) -> str:
    """The name of such a tensor in another layer."""
    return _LAYER.sub(rf"\g<1>{layer}\g<3>", name)


def expert_of(name: str) -> int | None:
    """Number of the expert that a tensor belongs to; ``None`` if to none."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else int(match[2])


def of_expert(name: str, expert: int) -> str:
    """The name of such a tensor of another expert."""
    return _EXPERT.sub(rf"\g<1>{expert}\g<3>", name)


def count(numbers: Iterable[int | None]) -> int:
    """How many layers or experts there are, if these are their numbers."""
    return max((number for number in numbers if number is not None), default=-1) + 1


def are_megatrons(names: Iterable[str]) -> bool:
    """Whether tensors are those of a model, or a part of one, by Megatron-core's names."""
    return any(_is_megatrons(name) for name in _unwrapped(names))


def have_adapter(names: Iterable[str]) -> bool:
    """Whether an adapter is among the tensors."""
    return any(".adapter." in name for name in names)


def have_base(names: Iterable[str]) -> bool:
    """Whether weights of a model are among the tensors, beside those of an adapter."""
    return any(_is_megatrons(name) and ".adapter." not in name for name in _unwrapped(names))


def _unwrapped(names: Iterable[str]) -> Iterator[str]:
    return (_WRAPPERS.sub("", name) for name in names)


def _is_megatrons(name: str) -> bool:
    return name.startswith(("decoder.layers.", "embedding.word_embeddings."))
