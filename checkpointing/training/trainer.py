"""The training loop that the recipes drive."""

import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from checkpointing.errors import CheckpointingError, ConfigError
from checkpointing.families import FAMILIES
from checkpointing.training.batches import Batch, BatchLoader
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.metric_logging import MetricLogger
from checkpointing.training.rng import rng_state, set_rng_state
from checkpointing.training.tokenizer import IGNORED


class NonFiniteLossError(CheckpointingError, ArithmeticError):
    """The loss or the gradient is infinite or not a number."""


class Checkpointer(Protocol):
    """The part of a checkpointer that the loop uses."""

    def save_checkpoint(
        self,
        state_dict: dict[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
        *,
        step: int | None = None,
        dir_prefix: str = "epoch",
    ) -> Path:
        """Writes a checkpoint and returns its directory."""

    def check_save(self, state_dict: dict[str, Any], adapter_only: bool = False) -> None:
        """Raises what would keep a state from being saved; writes nothing."""


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


class Trainer:
    """Trains a decoder on next-token prediction and saves all that is needed to go on.

    A step of the optimizer uses ``gradient_accumulation_steps`` batches; the last one of an epoch
    uses what is left. The loss of a step is the mean over all labelled tokens of its batches.

    A run that is resumed takes the same steps as one that was never interrupted: on a CPU bit for
    bit, as long as the number of threads stays the same.

    Raises:
        ConfigError: if the model is no language model.

    Args:
        model: whose parameters that require a gradient are trained.
        optimizer: of these parameters.
        batches: the data.
        options: how long to train and when to save.
        checkpointer: writes the checkpoints.
        weights: gives the entries of a checkpoint that are weights (``model``, ``adapter``,
            ``adapter_config``), when one is to be written.
        device: where the model is.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        optimizer: Optimizer,
        batches: BatchLoader,
        options: TrainingOptions,
        checkpointer: Checkpointer,
        weights: Callable[[], dict[str, Any]],
        device: torch.device,
    ) -> None:
        if FAMILIES[model.config.family].task_type != "CAUSAL_LM":
            raise ConfigError(
                f"{model.config.family}: this loop trains models that predict the next token, and "
                "this one classifies; its checkpoint can be converted, merged and exported"
            )
        self._model = model
        self._optimizer = optimizer
        self._batches = batches
        self._options = options
        self._checkpointer = checkpointer
        self._weights = weights
        self._device = device
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.epochs_run = 0
        self.steps_run = 0
        self._steps_in_epoch = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        steps = math.ceil(len(self._batches) / self._options.gradient_accumulation_steps)
        limit = self._options.max_steps_per_epoch
        return steps if limit is None else min(steps, limit)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self._options.epochs * self.steps_per_epoch

    def train(self, scheduler: LRScheduler | None, logger: MetricLogger) -> Path | None:
        """Trains to the last epoch.

        Args:
            scheduler: is stepped after each optimizer step.
            logger: takes loss, learning rate, gradient norm and tokens per second.

        Returns:
            Directory of the last checkpoint; ``None`` if there was nothing left to do.

        Raises:
            CheckpointingError: before the first step, if what is trained could not be saved.
            NonFiniteLossError: if the training diverges; what was saved before stays as it is.
        """
        self._checkpointer.check_save(
            {**self._weights(), **self.state_dict()}, self._options.save_adapter_weights_only
        )
        checkpoint = None
        self._model.train()
        while self.epochs_run < self._options.epochs:
            checkpoint = self._train_epoch(scheduler, logger)
        return checkpoint

    def _train_epoch(self, scheduler: LRScheduler | None, logger: MetricLogger) -> Path:
        if self._steps_in_epoch == 0:
            self._batches.start_epoch(self.epochs_run)
        batches = iter(self._batches)
        save_every = self._options.save_every_n_steps
        title = f"epoch {self.epochs_run + 1}/{self._options.epochs}"
        with tqdm(
            total=self.steps_per_epoch, initial=self._steps_in_epoch, desc=title, unit="step"
        ) as bar:
            while self._steps_in_epoch < self.steps_per_epoch:
                group = list(islice(batches, self._options.gradient_accumulation_steps))
                metrics = self._step(group)
                if scheduler is not None:
                    scheduler.step()
                self.steps_run += 1
                self._steps_in_epoch += 1
                bar.update()
                bar.set_postfix_str(
                    f"loss {metrics['loss']:.4f}, lr {metrics['lr']:.2e}, "
                    f"{metrics['tokens_per_second']:.0f} tokens/s"
                )
                if self.steps_run % self._options.log_every_n_steps == 0:
                    logger.log_dict(metrics, self.steps_run)
                epoch_ends = self._steps_in_epoch == self.steps_per_epoch
                if save_every and self.steps_run % save_every == 0 and not epoch_ends:
                    bar.set_description_str(f"{title}, saving")
                    self._save(self.epochs_run, "step", intermediate=True)
                    bar.set_description_str(title)
        epoch = self.epochs_run
        self.epochs_run += 1
        self._steps_in_epoch = 0
        self._batches.start_epoch(self.epochs_run)
        return self._save(epoch, "epoch", intermediate=self.epochs_run < self._options.epochs)

    def _step(self, group: list[Batch]) -> dict[str, float]:
        """One step of the optimizer; returns its numbers."""
        started = time.perf_counter()
        number = self.steps_run + 1
        lr = self._optimizer.param_groups[0]["lr"]
        group = [batch.to(self._device) for batch in group]
        labelled = sum((batch.labels[:, 1:] != IGNORED).sum() for batch in group)
        self._optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._device)
        for batch in group:
            part = summed_loss(self._model, batch) / labelled
            part.backward()
            loss += part.detach()
        _check_finite(loss, "loss", number)
        norm = self._gradient_norm()
        _check_finite(norm, "gradient norm", number)
        self._optimizer.step()
        seconds = time.perf_counter() - started
        return {
            "loss": loss.item(),
            "lr": float(lr),
            "grad_norm": norm.item(),
            "tokens_per_second": sum(batch.num_tokens for batch in group) / seconds,
        }

    def _gradient_norm(self) -> Tensor:
        """L2 norm of the gradient of all parameters, before it is clipped as the options ask."""
        if self._options.clip_grad_norm is not None:
            return clip_grad_norm_(self._trained, self._options.clip_grad_norm)
        return get_total_norm([p.grad for p in self._trained if p.grad is not None])

    def _save(self, epoch: int, prefix: str, intermediate: bool) -> Path:
        return self._checkpointer.save_checkpoint(
            {**self._weights(), **self.state_dict()},
            epoch=epoch,
            intermediate_checkpoint=intermediate,
            adapter_only=self._options.save_adapter_weights_only,
            step=self.steps_run,
            dir_prefix=prefix,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on and is not weights."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "epochs_run": self.epochs_run,
            "steps_run": self.steps_run,
            "steps_in_epoch": self._steps_in_epoch,
            "seed": self._options.seed,
            "total_epochs": self._options.epochs,
            "max_steps_per_epoch": self._options.max_steps_per_epoch,
            "gradient_accumulation_steps": self._options.gradient_accumulation_steps,
            "dataloader": self._batches.state_dict(),
            "rng_state": rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where a saved run was. Call it before the schedule is made.

        The settings of the optimizer that the config gives count, not those that were saved.

        Raises:
            ConfigError: if the state lacks an entry or does not fit the optimizer or the data.
        """
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise ConfigError(
                f"the checkpoint cannot be resumed: its recipe state lacks {', '.join(missing)}; "
                "it was not written by one of these recipes, or has no recipe state. Train from "
                "its weights with resume_from_checkpoint=False"
            )
        accumulated = state["gradient_accumulation_steps"]
        if state["steps_in_epoch"] > 0 and accumulated != self._options.gradient_accumulation_steps:
            raise ConfigError(
                f"cannot go on within epoch {state['epochs_run']} with another "
                f"gradient_accumulation_steps than {accumulated}; set it back, or resume from a "
                "checkpoint at the end of an epoch"
            )
        load_optimizer(self._optimizer, state["optimizer"])
        self._batches.load_state_dict(state["dataloader"])
        self.epochs_run = state["epochs_run"]
        self.steps_run = state["steps_run"]
        self._steps_in_epoch = state["steps_in_epoch"]
        set_rng_state(state["rng_state"])


def summed_loss(model: TransformerDecoder, batch: Batch) -> Tensor:
    """Sum of the cross entropies, in fp32, of all labelled tokens given those before them."""
    targets = batch.labels[:, 1:]
    wanted = F.pad(targets != IGNORED, (0, 1))
    logits = model(
        batch.tokens,
        input_pos=batch.input_pos,
        document_ids=batch.document_ids,
        wanted=wanted,
    )
    return F.cross_entropy(logits.float(), targets[targets != IGNORED], reduction="sum")


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restores an optimizer's state, but keeps the settings that it was made with.

    Raises:
        ConfigError: if the state is of another number of parameters or groups.
    """
    settings = [dict(group) for group in optimizer.param_groups]
    arguments = inspect.signature(type(optimizer)).parameters
    try:
        optimizer.load_state_dict(dict(saved))
    except ValueError as error:
        raise ConfigError(
            f"the saved optimizer state does not fit this run: {error}; use the same optimizer "
            "and trained modules as the run that saved it"
        ) from error
    for group, made_with in zip(optimizer.param_groups, settings, strict=True):
        # Only arguments: some optimizers keep counters of theirs in the groups too.
        group.update({key: made_with[key] for key in arguments if key in made_with})
        # What the schedule scales; it is asked for when a schedule starts in mid-run.
        lr = group["lr"]
        # torchao's optimizers have a tensor, which the schedule changes in place.
        group["initial_lr"] = lr.clone() if isinstance(lr, Tensor) else lr


def _check_finite(value: Tensor, what: str, step: int) -> None:
    if not torch.isfinite(value):
        raise NonFiniteLossError(
            f"the {what} of step {step} is {value.item()}; the step is not taken and nothing is "
            "saved. Lower optimizer.lr, set clip_grad_norm, or train in another dtype; the last "
            "checkpoint is as it was"
        )
