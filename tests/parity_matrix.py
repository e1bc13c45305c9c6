"""Measures how far exported adapters are from the native model, for every family and kind.

    python -m tests.parity_matrix > docs/parity.md

Tiny random models, computed in fp64, so that a figure is the error and not the noise of fp32. The
last column is the adapter that torchtune 0.6.1 writes of the same tensors, loaded by PEFT; for it
the real torchtune is installed in an environment of its own.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from tqdm import tqdm

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.mapping.model_config import Dims
from checkpointing.training import add_adapter, build_decoder
from checkpointing.training.lora import load_adapter
from tests.families.variants import IN_FP64, VARIANTS, compared, tokens, write
from tests.peers.environment import build_wheel, torchtune_environment
from tests.peers.torchtune_process import Torchtune, TorchtuneError
from tests.tiny import ATTENTION, EXPERTS, MLP, random_adapter, targets_of

# Families that torchtune 0.6.1 has, by its ModelType.
TORCHTUNE = {
    "llama": "LLAMA3",
    "mistral": "MISTRAL",
    "qwen2": "QWEN2",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "llama_classifier": "REWARD",
}
NAMES = [name for name, (model_type, _) in VARIANTS.items() if name == model_type]
TARGETS = {
    "attention": ATTENTION,
    "mlp": (*MLP, *EXPERTS),
    "all": (*ATTENTION, *MLP, *EXPERTS, "output"),
}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rsLoRA, patterns": {"use_rslora": True},
}


@dataclass(frozen=True)
class Row:
    """Largest absolute difference of two logits, against the native model with its adapter.

    Attributes:
        case: family, kind and targets.
        effect: of the base without the adapter.
        peft: of transformers with the exported adapter.
        merged: of transformers with the merged export.
        back: of the native model with the exported adapter, read back.
        torchtune: of transformers with the adapter that torchtune writes, or why there is none.
    """

    case: tuple[str, str, str]
    effect: float
    peft: float
    merged: float
    back: float
    torchtune: str


def adapter_config(kind: str, targets: tuple[str, ...]) -> AdapterConfig:
    """Rank 4 and alpha 6; the patterns are on one module in the middle."""
    options = dict(KINDS[kind])
    if "patterns" in kind:
        modules = {"q_proj": "attn.q_proj", "w2": "mlp.w2", "down_proj": "mlp.experts.down_proj"}
        module = next(f"layers.1.{name}" for last, name in modules.items() if last in targets)
        options |= {"rank_pattern": {module: 3}, "alpha_pattern": {module: 11}}
    return AdapterConfig(4, 6, targets, **options)


def logits(model: nn.Module) -> Tensor:
    """In fp64, of a model of either kind."""
    with torch.no_grad():
        found = model.double().eval()(tokens())
    return getattr(found, "logits", found)


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, of the last token where there are no others."""
    if found.dim() == expected.dim():
        return float((found - expected).abs().max())
    return float(compared(expected, found).abs().max())


def native(checkpointer: FullModelHFCheckpointer, state: dict[str, Any]) -> Tensor:
    """Logits of the native model with the adapter of a state dict."""
    model = build_decoder(checkpointer.model_config, state["model"], torch.float64)
    config = AdapterConfig.from_state(state["adapter_config"])
    add_adapter(model, config)
    load_adapter(model, state["adapter"])
    return logits(model)


def _is_left_out(target: str, dims: Dims, kind: str) -> bool:
    """A tied head, the head of a classifier, which PEFT trains whole, and DoRA on experts."""
    if target == "output":
        return dims.tied or dims.labels > 0
    return kind == "DoRA" and target in EXPERTS


def measure(
    name: str, kind: str, which: str, directory: Path, torchtune: Torchtune | None
) -> Row | None:
    """Measures one case in an empty directory; ``None`` if there is no such case."""
    model = write(name, directory / "base")
    checkpointer = FullModelHFCheckpointer(directory / "base", output_dir=directory / "out")
    dims = checkpointer.model_config.dims
    targets = tuple(t for t in targets_of(dims, TARGETS[which]) if not _is_left_out(t, dims, kind))
    if not targets:
        return None
    config = adapter_config(kind, targets)
    adapter = random_adapter(dims, config)
    weights = checkpointer.load_checkpoint()["model"]
    state = {
        "model": MergedStateDict(weights, adapter, config),
        "adapter": adapter,
        "adapter_config": config.to_state(),
    }
    saved = checkpointer.save_checkpoint(state, epoch=0)
    expected = native(checkpointer, {**state, "model": weights})
    # Just what PEFT reads: beside it lies the native adapter, which would be preferred.
    (directory / "peft").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(saved / file, directory / "peft")
    back = FullModelHFCheckpointer(directory / "base", adapter_checkpoint=directory / "peft")

    def off(found: Tensor) -> float:
        return distance(found, expected)

    base = type(model).from_pretrained(directory / "base", **IN_FP64)
    return Row(
        case=(name, kind, which),
        effect=off(logits(model)),
        merged=off(logits(type(model).from_pretrained(saved / "merged", **IN_FP64))),
        back=off(native(back, back.load_checkpoint())),
        peft=off(logits(PeftModel.from_pretrained(base, saved))),
        torchtune=_torchtune(name, kind, model, config, adapter, directory, torchtune, expected),
    )


def _torchtune(
    name: str,
    kind: str,
    model: nn.Module,
    config: AdapterConfig,
    adapter: dict[str, Tensor],
    directory: Path,
    torchtune: Torchtune | None,
    expected: Tensor,
) -> str:
    if name == "phi3":
        return "no PEFT form"
    if torchtune is None or name not in TORCHTUNE:
        return "no such family"
    if "patterns" in kind:
        return "no such kind"
    state = {
        "adapter": adapter,
        "adapter_config": {
            "r": config.r,
            "lora_alpha": config.alpha,
            "target_modules": list(config.target_modules),
            "peft_type": "LORA",
        },
    }
    arguments = {
        "checkpoint_dir": str(directory / "base"),
        "checkpoint_files": ["model.safetensors"],
        "model_type": TORCHTUNE[name],
        "output_dir": str(directory / "theirs"),
    }
    try:
        torchtune.save("FullModelHFCheckpointer", state, arguments, adapter_only=True)
    except TorchtuneError as error:
        return f"fails: {str(error).strip().splitlines()[-1].split(':')[0]}"
    saved = directory / "theirs" / "epoch_0"
    if not (saved / "adapter_config.json").exists():
        return "writes none"
    base = type(model).from_pretrained(directory / "base")
    found = logits(PeftModel.from_pretrained(base, saved))
    return f"{distance(found, expected):.0e}"


def measure_all(torchtune: Torchtune | None) -> Iterator[Row]:
    """All cases, with a progress bar on standard error."""
    cases = [(name, kind, which) for name in NAMES for kind in KINDS for which in TARGETS]
    for case in tqdm(cases, file=sys.stderr):
        with tempfile.TemporaryDirectory() as directory:
            row = measure(*case, Path(directory), torchtune)
            if row is not None:
                yield row


def main() -> None:
    """Prints the table in Markdown."""
    with tempfile.TemporaryDirectory() as directory:
        python = torchtune_environment(build_wheel(Path(directory) / "wheel"))
        torchtune = Torchtune(python, Path(directory))
        rows = list(measure_all(torchtune))
        torchtune.close()
    print(HEADER)
    for row in rows:
        figures = (row.effect, row.peft, row.merged, row.back)
        cells = [*row.case, *(f"{figure:.0e}" for figure in figures), row.torchtune]
        print(f"| {' | '.join(cells)} |")


HEADER = """\
# Parity

Printed by `python -m tests.parity_matrix`, which takes about two minutes.

The largest absolute difference of two logits between the native model with its adapter, and:

- *effect*: the base without the adapter, to compare the others with;
- *PEFT*: transformers with the exported adapter, loaded by PEFT;
- *merged*: transformers with the merged export;
- *back*: the native model with the exported adapter, read back;
- *torchtune*: transformers with the adapter that torchtune 0.6.1 writes of the same tensors. It
  says itself that it has no PEFT form for Phi. Its classifier (REWARD) takes hidden / heads for the
  width of a head, which it is not here.

Tiny random models in fp64, with every size different; what remains (1e-6) is that norms and
rotations are computed in fp32 everywhere. *all* includes `lm_head` where it is not tied, and *mlp*
the experts, for which there is no DoRA. The patterns give one module a rank and an alpha of its
own. A classifier is a model with a head for classes; its logits are those of the last token.

| family | adapter | on | effect | PEFT | merged | back | torchtune |
|---|---|---|---|---|---|---|---|"""


if __name__ == "__main__":
    main()
