"""The types of the fields of ``config.json``, which are checked before any of them is used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.storage.read import read_json

# An example of what a field holds, of those that no family's defaults tell.
_EXAMPLES: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
    "norm_topk_prob": False,
    "max_window_layers": 0,
    "layer_types": ["full_attention"],
    "no_rope_layers": [1],
    "mlp_only_layers": [0],
    "moe_layers": [0],
    "cross_attention_layers": [0],
    "text_config": {"model_type": "llama"},
    "vision_config": {},
    "audio_config": {},
}
_KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    dict: "an object",
    list: "a list",
    tuple: "a list",
}


def read_config(path: Path) -> dict[str, Any]:
    """A ``config.json`` whose fields have the types that they must have.

    Raises:
        CheckpointNotFoundError: if the file is not there.
        CorruptCheckpointError: if it is not JSON, or no object.
        ConfigError: if a field is of another type.
    """
    config = read_json(path)
    check_types(path, config, _EXAMPLES)
    return config


def check_types(path: Path, values: Mapping[str, Any], examples: Mapping[str, Any]) -> None:
    """Checks that fields are of the types of others; ``null`` stands for a missing field.

    Args:
        path: the config file, for errors.
        values: its content.
        examples: a right value of some fields; of a list, its items have the type of the first.

    Raises:
        ConfigError: names the field.
    """
    for key, example in examples.items():
        value = values.get(key)
        if value is not None and example is not None:
            _check(path, key, value, example)


def _check(path: Path, key: str, value: Any, example: Any) -> None:
    kind = _KINDS[type(example)]
    if _KINDS.get(type(value)) != kind:
        raise ConfigError(f"{path}: {key} is {_short(value)}, but must be {kind}")
    if isinstance(example, Mapping):
        check_types(path, value, example)
    elif isinstance(example, Sequence) and not isinstance(example, str) and example:
        for item in value:
            _check(path, f"an item of {key}", item, example[0])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
