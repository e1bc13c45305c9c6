"""What a run says when it is done."""

from pathlib import Path

from checkpointing.storage.location import is_remote
from checkpointing.storage.mirror import origin_of


def next_steps(checkpoint: Path | None, base: str | Path, epochs: int) -> str:
    """Where the last checkpoint lies, and what can be done with it.

    Args:
        checkpoint: directory of the last checkpoint; ``None`` if nothing was left to train.
        base: directory of the model that was fine-tuned.
        epochs: of the run.
    """
    if checkpoint is None:
        return (
            f"Nothing left to train: the checkpoint that was resumed has all {epochs} epochs. "
            f"To go on, raise epochs, for example epochs={epochs + 1}."
        )
    lines = [f"Checkpoint: {checkpoint}"]
    uploaded = origin_of(checkpoint.parent)
    if is_remote(uploaded):
        lines = [f"Checkpoint: {uploaded}/{checkpoint.name}", f"On this machine: {checkpoint}"]
    if (checkpoint / "adapter_config.json").is_file():
        lines.append(
            "Adapter in PEFT:\n"
            "  PeftModel.from_pretrained("
            f"AutoModelForCausalLM.from_pretrained('{base}'), '{checkpoint}')"
        )
    for model in (checkpoint / "merged", checkpoint):
        if (model / "config.json").is_file():
            lines.append(
                "Fine-tuned model in transformers:\n"
                f"  AutoModelForCausalLM.from_pretrained('{model}')"
            )
            lines.append(f"Check against transformers:\n  tune parity {checkpoint}")
            break
    lines.append(
        f"Train on:\n  the same command with resume_from_checkpoint=True epochs={epochs + 1}"
    )
    return "\n".join(lines)
