"""How long and how a run trains, and when it saves."""

from dataclasses import dataclass

from checkpointing.errors import ConfigError


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how a run trains, and when it saves.

    Attributes:
        epochs: times that the data is gone through.
        seed: of the run.
        max_steps_per_epoch: optimizer steps after which an epoch ends early.
        gradient_accumulation_steps: batches whose gradients make one optimizer step.
        clip_grad_norm: largest L2 norm of the gradient of all parameters; ``None``: no limit.
        save_every_n_steps: save at each such optimizer step too, not only after each epoch.
        save_adapter_weights_only: write the adapter without the merged model.
        log_every_n_steps: optimizer steps between two entries in the log.
        optimizer_in_bwd: each parameter is stepped within the backward pass, and its gradient
            freed; without a limit on the gradient, whose norm is not known then, and without
            accumulation.
        on_save_error: ``stop`` ends the run if the system refuses to write a checkpoint;
            ``continue`` says so and trains on without it. The last one of a run must be written.
        stop_deadline_seconds: time that a run has to save and to end when it gets a SIGTERM or
            SIGINT; ``None``: as long as it takes.

    Raises:
        ConfigError: if a number is not possible.
    """

    epochs: int
    seed: int
    max_steps_per_epoch: int | None = None
    gradient_accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    save_every_n_steps: int | None = None
    save_adapter_weights_only: bool = False
    log_every_n_steps: int = 1
    optimizer_in_bwd: bool = False
    on_save_error: str = "stop"
    stop_deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "gradient_accumulation_steps", "log_every_n_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("max_steps_per_epoch", "save_every_n_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1, or null")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ConfigError(f"clip_grad_norm={self.clip_grad_norm}: must be above 0, or null")
        if self.optimizer_in_bwd and (
            self.clip_grad_norm is not None or self.gradient_accumulation_steps > 1
        ):
            raise ConfigError(
                f"optimizer_in_bwd=True with clip_grad_norm={self.clip_grad_norm} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: gradients are "
                "gone before their norm is known, and cannot be accumulated; set clip_grad_norm="
                "null and gradient_accumulation_steps=1, or optimizer_in_bwd=False"
            )
        if self.on_save_error not in ("stop", "continue"):
            raise ConfigError(f"on_save_error={self.on_save_error}: there are continue, stop")
        deadline = self.stop_deadline_seconds
        if deadline is not None and not deadline > 0:
            raise ConfigError(f"stop_deadline_seconds={deadline}: must be above 0, or null")
