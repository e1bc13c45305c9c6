"""Compare a checkpoint's logits with those of transformers and PEFT.

A LoRA or DoRA checkpoint: the native model with its adapter against transformers with the adapter
loaded by PEFT, and against the merged model where there is one. Another checkpoint: the native
model against transformers. All is computed in fp32; a difference above 1e-4 is a failure, except
for a merged model, whose weights are rounded when they are merged. After QLoRA both have the base
that was trained on, rounded to NF4.

example:
  tune parity out/smollm2_135M_lora/epoch_0
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.cli.errors import UsageError
from checkpointing.errors import CheckpointNotFoundError
from checkpointing.storage.location import path_or_url

if TYPE_CHECKING:
    from torch import Tensor

    from checkpointing.nf4 import NF4Rounding

LIMIT = 1e-4
_PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


@dataclass(frozen=True)
class Comparison:
    """The native model against another way to compute the same.

    Attributes:
        other: what it was compared with.
        difference: largest absolute difference of two logits.
        rounded_to: the dtype to which the other's weights were rounded when they were merged,
            such as ``bfloat16``; ``None`` if both have the same numbers.
    """

    other: str
    difference: float
    rounded_to: str | None = None

    @property
    def failed(self) -> bool:
        """The difference is not explained by fp32 arithmetic, or by rounding where there was."""
        limit = LIMIT if self.rounded_to is None else sys.float_info.max
        return not self.difference <= limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune parity`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=path_or_url, help="its directory")
    parser.add_argument(
        "--base",
        metavar="DIR",
        type=path_or_url,
        help="the model that was fine-tuned; as adapter_config.json says if left out",
    )


def execute(args: argparse.Namespace) -> int:
    """Prints the differences; 1 if one is a failure."""
    from checkpointing.storage.mirror import local

    checkpoint = local(args.checkpoint, whole=True)
    if not checkpoint.is_dir():
        raise CheckpointNotFoundError(f"there is no checkpoint directory {checkpoint}")
    _check_installed()
    comparisons = compare(checkpoint, None if args.base is None else local(args.base))
    print(f"largest difference of the fp32 logits, {len(_PROMPTS)} prompts, native model against")
    width = max(len(each.other) for each in comparisons)
    for each in comparisons:
        print(f"  {each.other:{width}}  {each.difference:.1e}  {_verdict(each)}")
    return int(any(each.failed for each in comparisons))


def compare(checkpoint: Path, base: Path | None = None) -> list[Comparison]:
    """Computes the logits of a checkpoint in all ways there are. One model at a time is in memory.

    Args:
        checkpoint: a Hugging Face directory with a whole model, or one with an adapter as
            `tune run` writes it.
        base: directory of the model that the adapter is for; ``None``: the one that the adapter's
            ``adapter_config.json`` names.

    Raises:
        UsageError: if the base is not to be found.
        CheckpointingError: if a checkpoint cannot be read.
    """
    from checkpointing.adapter_checkpoint import open_adapter
    from checkpointing.cli.quiet import quiet

    if not (checkpoint / "adapter_config.json").is_file():
        prompts = _tokens(checkpoint, checkpoint)
        native = _native_logits(checkpoint, None, prompts)
        with quiet(progress=False):
            other, _ = _transformers_logits(checkpoint, None, prompts)
        return [Comparison("transformers", _difference(native, other))]

    base = base or _named_base(checkpoint)
    prompts = _tokens(base, checkpoint)
    rounding = open_adapter(checkpoint).base_rounding
    native = _native_logits(base, checkpoint, prompts, rounding)
    with quiet(progress=False):
        other, _ = _transformers_logits(base, checkpoint, prompts, rounding)
        name = "transformers + PEFT" + ("" if rounding is None else ", base in NF4")
        comparisons = [Comparison(name, _difference(native, other))]
        merged = checkpoint / "merged"
        if (merged / "config.json").is_file():
            other, dtype = _transformers_logits(merged, None, prompts)
            name = f"merged model in {dtype}"
            comparisons.append(Comparison(name, _difference(native, other), rounded_to=dtype))
    return comparisons


def _native_logits(
    base: Path,
    adapter_from: Path | None,
    prompts: list["Tensor"],
    rounding: "NF4Rounding | None" = None,
) -> list["Tensor"]:
    import torch

    from checkpointing import FullModelHFCheckpointer
    from checkpointing.adapters.config import AdapterConfig
    from checkpointing.mapping.tensors import as_source
    from checkpointing.training.decoder import build_decoder
    from checkpointing.training.lora import add_adapter, load_adapter

    adapter_file = None if adapter_from is None else adapter_from / "adapter_model.pt"
    checkpointer = FullModelHFCheckpointer(base, adapter_checkpoint=adapter_file)
    state = checkpointer.load_checkpoint()
    weights = state.pop("model")
    if rounding is not None:
        weights = rounding.rounded(as_source(weights))
    model = build_decoder(checkpointer.model_config, weights, torch.float32, "cpu")
    if adapter_from is not None:
        if "adapter_config" not in state:
            raise UsageError(
                f"{adapter_from} has no manifest that tells of its adapter; give a checkpoint that "
                "`tune run` wrote, such as out/smollm2_135M_lora/epoch_0"
            )
        add_adapter(model, AdapterConfig.from_state(state["adapter_config"]))
        load_adapter(model, state["adapter"])
    model.eval()
    with torch.inference_mode():
        return [model(tokens) for tokens in prompts]


def _transformers_logits(
    model_dir: Path,
    adapter_dir: Path | None,
    prompts: list["Tensor"],
    rounding: "NF4Rounding | None" = None,
) -> tuple[list["Tensor"], str]:
    """The logits in fp32, and the dtype in which the model's weights are stored."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    model = model.float()
    if rounding is not None:
        model.load_state_dict(_rounded_weights(model_dir, rounding), strict=False)
    if adapter_dir is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter_dir))
    model.eval()
    with torch.inference_mode():
        return [model(input_ids=tokens).logits for tokens in prompts], dtype


def _rounded_weights(model_dir: Path, rounding: "NF4Rounding") -> dict[str, "Tensor"]:
    """A model's weights in NF4 and back, in the names of transformers."""
    from checkpointing.formats.detect import find_model

    found = find_model(model_dir)
    model = found.open()
    tensors = found.format.plan(rounding.rounded(model.native), model)
    return {name: tensors.read(name) for name in tensors.metas}


def _tokens(*directories: Path) -> list["Tensor"]:
    """The prompts as ids ``[1, seq]``, by the first tokenizer found."""
    import torch
    from tokenizers import Tokenizer

    for directory in directories:
        file = directory / "tokenizer.json"
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
            return [torch.tensor([tokenizer.encode(prompt).ids]) for prompt in _PROMPTS]
    raise CheckpointNotFoundError(
        f"no tokenizer.json in {directories[0]}; the prompts cannot be written as tokens without it"
    )


def _named_base(checkpoint: Path) -> Path:
    """The base's directory, by PEFT's config or, if that names a repository, by the manifest."""
    from checkpointing.storage.manifest import read_manifest
    from checkpointing.storage.read import read_json

    file = checkpoint / "adapter_config.json"
    named = read_json(file).get("base_model_name_or_path")
    trained_on = (read_manifest(checkpoint) or {}).get("base", {}).get("directory")
    for name in (named, trained_on):
        if name and Path(name).is_dir():
            return Path(name)
    raise UsageError(
        f"{file} names the base model {named!r}, which is not a directory here; pass the base "
        "model's directory with --base"
    )


def _difference(ours: list["Tensor"], theirs: list["Tensor"]) -> float:
    import torch

    # torch's maximum is NaN if one of the logits is.
    return float(
        torch.stack([(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]).max()
    )


def _verdict(comparison: Comparison) -> str:
    if comparison.failed:
        return f"FAILED, limit {LIMIT:.0e}"
    if comparison.rounded_to is not None:
        return f"from rounding the merged weights to {comparison.rounded_to}"
    return f"ok, limit {LIMIT:.0e}"


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("transformers", "peft") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the comparison needs {' and '.join(missing)}; "
            'install with: pip install "tunepoint[hf]"'
        )
