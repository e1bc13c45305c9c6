"""An adapter as a directory that inference engines load."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpointing.adapter_checkpoint import write_peft
from checkpointing.adapters.peft import PeftAdapter
from checkpointing.adapters.peft_whole import CLASSIFIER
from checkpointing.convert import written
from checkpointing.errors import ConfigError
from checkpointing.export.stream import WeightStream
from checkpointing.mapping.tensors import as_source
from checkpointing.storage.digest import checksum_of
from checkpointing.storage.tensor_bytes import tensor_bytes

_KEY_DIGITS = 12


def check_servable(config: Mapping[str, Any]) -> None:
    """Checks that an engine computes all of an adapter.

    Engines ignore what they do not know of PEFT's config, and the tensors that belong to it.

    Args:
        config: content of ``adapter_config.json``.

    Raises:
        ConfigError: if a part of the adapter would be left out.
    """
    # The head of a classifier is read by the engines that serve one.
    saved = config.get("modules_to_save") and config.get("task_type") != CLASSIFIER
    never = {
        "DoRA": config.get("use_dora"),
        "a bias of B (lora_bias)": config.get("lora_bias"),
        "modules that are trained whole (modules_to_save)": saved,
        "experts that are stored together (target_parameters)": config.get("target_parameters"),
    }
    if has := [kind for kind, is_so in never.items() if is_so]:
        raise ConfigError(
            f"the adapter has {' and '.join(has)}, which no inference engine serves; give the "
            "engine merged weights (`tune export --merged --to dir`, or merged_stream)"
        )
    fields = ("use_rslora", "rank_pattern", "alpha_pattern")
    if exact := [field for field in fields if config.get(field)]:
        raise ConfigError(
            f"the adapter has {' and '.join(exact)}, which engines ignore; give it in the portable "
            "form, whose tensors hold that too"
        )


def adapter_key(stream: WeightStream, tensors: Mapping[str, Tensor]) -> str:
    """Hexadecimal; adapters that compute otherwise, or have another base, have another one.

    Args:
        stream: an adapter's, read to its end.
        tensors: what it handed out.
    """
    digests = {
        name: stream.digests.get(name) or checksum_of([tensor_bytes(tensor)])
        for name, tensor in tensors.items()
    }
    content = json.dumps([stream.adapter_config, digests], sort_keys=True)
    return sha256(content.encode()).hexdigest()[:_KEY_DIGITS]


def write_adapter_stream(
    stream: WeightStream, tensors: Mapping[str, Tensor], directory: Path
) -> None:
    """Writes an adapter's stream; the directory appears whole, or not at all.

    Args:
        stream: an adapter's, read to its end.
        tensors: what it handed out.
        directory: to write; it is replaced if it is there.

    Raises:
        OutOfSpaceError: if the disk has no room; nothing is written then.
        WriteError: if the system refuses to write.
    """
    assert stream.adapter_config is not None
    peft = PeftAdapter(as_source(tensors), stream.adapter_config, stream.notes)
    with written(directory, stream.nbytes) as writer:
        write_peft(writer, peft)
        writer.manifest({"format": "peft", "version": stream.version})
