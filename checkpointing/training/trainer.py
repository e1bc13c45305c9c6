"""The training loop that the recipes drive."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from tqdm import tqdm

from checkpointing.errors import CheckpointingError, ConfigError
from checkpointing.families import FAMILIES
from checkpointing.save_plan import RUN_KEY, SaveTimes
from checkpointing.storage.local_part import whole
from checkpointing.training.batches import Batch
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.distributed import DataShare, job
from checkpointing.training.metric_logging import MetricLogger
from checkpointing.training.optimizer_state import load_optimizer, parameters_of
from checkpointing.training.options import TrainingOptions
from checkpointing.training.rng import rng_state, set_rng_state, set_seed
from checkpointing.training.row_loader import RowLoader
from checkpointing.training.schedule import Schedule
from checkpointing.training.signals import StoppedBySignal, StopSignals
from checkpointing.training.step_in_backward import step_in_backward
from checkpointing.training.tokenizer import IGNORED

logger = logging.getLogger(__name__)

Step = Callable[[list[Any], int], dict[str, float]]

# What older checkpoints, and those of other recipes, may lack.
_OPTIONAL = frozenset({RUN_KEY, "lr_scheduler", "parameter_dtypes"})
# The numbers of a step beside the progress bar, as far as it has them.
_SHOWN = {
    "reward_mean": "reward {:.4f}",
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:.0f} tokens/s",
}


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
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Writes a checkpoint and returns its directory."""

    def check_save(self, state_dict: dict[str, Any], adapter_only: bool = False) -> None:
        """Raises what would keep a state from being saved; writes nothing."""

    @property
    def times(self) -> SaveTimes | None:
        """What the last save cost that has ended."""

    def wait(self, *, block: bool = True) -> None:
        """Raises what went wrong in a save that is written in the background, if it has ended."""

    def claim_output_dir(self) -> AbstractContextManager[None]:
        """Keeps other processes from saving to the same place while the block runs."""


class Trainer:
    """Trains a decoder, on next-token prediction or as it is told, and saves all to go on with.

    A step of the optimizer uses ``gradient_accumulation_steps`` batches; the last one of an epoch
    uses what is left. The loss of a step is the mean over all labelled tokens of its batches.

    A run that is resumed takes the same steps as one that was never interrupted: on a CPU bit for
    bit, as long as the number of threads stays the same.

    Several processes train one model, each on its share of the rows: a step of all together is that
    of one process with all of these rows, up to rounding. They save a checkpoint together, and
    what one of them raises or is told by a signal ends the run in all.

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
        record: what the run is (:func:`~checkpointing.training.run_record`), kept in checkpoints.
        step: takes one step of a run, given its batches and its number, counted from 1; returns
            its numbers, ``loss``, ``lr`` and ``tokens_per_second`` among them. ``None``: for
            next-token prediction.
        share: the part of the rows that ``batches`` hands out in this process.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        optimizer: Optimizer,
        batches: RowLoader,
        options: TrainingOptions,
        checkpointer: Checkpointer,
        weights: Callable[[], dict[str, Any]],
        device: torch.device,
        record: Mapping[str, Any] | None = None,
        step: Step | None = None,
        share: DataShare | None = None,
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
        self._record = record
        self._take_step = step or self._next_token_step
        self._share = share or DataShare()
        self._ranks = job()
        self._trained = [p for p in model.parameters() if p.requires_grad]
        if options.optimizer_in_bwd:
            step_in_backward(optimizer)
        self.epochs_run = 0
        self.steps_run = 0
        self._steps_in_epoch = 0
        self._schedule = Schedule(optimizer, None, {})
        self._resumed: Mapping[str, Any] | None = None
        self._metrics: dict[str, float] = {}
        self._last_checkpoint: Path | None = None
        self._logged_times: SaveTimes | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        steps = math.ceil(len(self._batches) / self._options.gradient_accumulation_steps)
        limit = self._options.max_steps_per_epoch
        return steps if limit is None else min(steps, limit)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run: those that were done, and those to come."""
        epochs = max(0, self._options.epochs - self.epochs_run)
        return self.steps_run + max(0, epochs * self.steps_per_epoch - self._steps_in_epoch)

    def train(self, schedule: Schedule, metric_logger: MetricLogger) -> Path | None:
        """Trains to the last epoch, or until the process gets a SIGTERM or SIGINT.

        Args:
            schedule: at its first step; it is taken to where a resumed run was.
            metric_logger: takes loss, learning rate, gradient norm and tokens per second.

        Returns:
            Directory of the last checkpoint; ``None`` if there was nothing left to do.

        Raises:
            CheckpointingError: before the first step, if what is trained could not be saved.
            NonFiniteLossError: if the training diverges; what was saved before stays as it is.
            WriteError: if the system refuses to write a checkpoint.
            StoppedBySignal: after a signal, when the step that ran is saved.
        """
        self._schedule = schedule
        if self._resumed is not None:
            groups = self._resumed["optimizer"]["param_groups"]
            schedule.take_up(self._resumed.get("lr_scheduler"), groups, self.steps_run)
            self._resumed = None
        state = {**self._weights(), **self.state_dict()}
        with self._ranks.agreed():
            self._checkpointer.check_save(state, self._options.save_adapter_weights_only)
        del state
        self._model.train()
        with (
            self._claimed_output_dir(),
            StopSignals(self._options.stop_deadline_seconds) as stop,
        ):
            while self.epochs_run < self._options.epochs:
                self._train_epoch(metric_logger, stop)
                if self.epochs_run < self._options.epochs:
                    self._stop_if_asked(stop.agreed())
        return self._last_checkpoint

    @contextmanager
    def _claimed_output_dir(self) -> Iterator[None]:
        """Keeps other runs, not the other processes of this one, from saving to the same place."""
        with ExitStack() as stack:
            with self._ranks.agreed():
                if self._ranks.is_first:
                    stack.enter_context(self._checkpointer.claim_output_dir())
            yield
            self._checkpointer.wait()

    def _train_epoch(self, metric_logger: MetricLogger, stop: StopSignals) -> None:
        if self._steps_in_epoch == 0:
            self._batches.start_epoch(self.epochs_run)
        batches = iter(self._batches)
        save_every = self._options.save_every_n_steps
        title = f"epoch {self.epochs_run + 1}/{self._options.epochs}"
        with tqdm(
            total=self.steps_per_epoch,
            initial=self._steps_in_epoch,
            desc=title,
            unit="step",
            disable=not self._ranks.is_first,
        ) as bar:
            while self._steps_in_epoch < self.steps_per_epoch:
                group = list(islice(batches, self._options.gradient_accumulation_steps))
                metrics = self._metrics = self._take_step(group, self.steps_run + 1)
                self._schedule.step(metrics["loss"])
                self.steps_run += 1
                self._steps_in_epoch += 1
                with self._save_errors():
                    self._checkpointer.wait(block=False)
                bar.update()
                bar.set_postfix_str(_shown(metrics))
                if self.steps_run % self._options.log_every_n_steps == 0:
                    metric_logger.log_dict({**metrics, **self._save_times()}, self.steps_run)
                if self._steps_in_epoch == self.steps_per_epoch:
                    break
                is_due = save_every is not None and self.steps_run % save_every == 0
                asked = stop.agreed()
                if is_due or asked:
                    bar.set_description_str(f"{title}, saving")
                    self._save(self.epochs_run, "step", is_last=asked is not None)
                    bar.set_description_str(title)
                    asked = stop.agreed()
                self._stop_if_asked(asked)
        epoch = self.epochs_run
        self.epochs_run += 1
        self._steps_in_epoch = 0
        self._batches.start_epoch(self.epochs_run)
        is_last = self.epochs_run == self._options.epochs or stop.agreed() is not None
        self._save(epoch, "epoch", is_last)

    def _next_token_step(self, group: list[Batch], number: int) -> dict[str, float]:
        """One step of the optimizer; returns its numbers."""
        started = time.perf_counter()
        lr = self._optimizer.param_groups[0]["lr"]
        group = [batch.to(self._device) for batch in group]
        own_labelled = [(batch.labels[:, 1:] != IGNORED).sum() for batch in group]
        labelled = self._share.total(torch.stack(own_labelled).sum())
        self._optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._device)
        for batch in group:
            part = summed_loss(self._model, batch) / labelled
            if self._options.optimizer_in_bwd:
                check_finite(self._share.total(part.detach()), "loss", number)
            part.backward()
            loss += part.detach()
        loss = self._share.total(loss)
        check_finite(loss, "loss", number)
        norms = {}
        if not self._options.optimizer_in_bwd:
            norm = clip_gradient(self._trained, self._options.clip_grad_norm)
            check_finite(norm, "gradient norm", number)
            norms = {"grad_norm": norm.item()}
            self._optimizer.step()
        own_tokens = sum(batch.num_tokens for batch in group)
        tokens = self._share.total(torch.tensor(own_tokens, device=self._device))
        seconds = time.perf_counter() - started
        return {
            "loss": loss.item(),
            "lr": float(lr),
            **norms,
            "tokens_per_second": tokens.item() / seconds,
        }

    def _save(self, epoch: int, prefix: str, is_last: bool) -> None:
        with self._save_errors():
            self._checkpointer.wait()
        with self._save_errors(is_last):
            self._last_checkpoint = self._checkpointer.save_checkpoint(
                {**self._weights(), **self.state_dict()},
                epoch=epoch,
                intermediate_checkpoint=self.epochs_run < self._options.epochs,
                adapter_only=self._options.save_adapter_weights_only,
                step=self.steps_run,
                dir_prefix=prefix,
                metrics=self._metrics,
            )
            if is_last:
                self._checkpointer.wait()

    def _save_times(self) -> dict[str, float]:
        """What a save cost that has ended since this was asked last, in seconds."""
        times = self._checkpointer.times
        if times is None or times is self._logged_times:
            return {}
        self._logged_times = times
        return {"save_blocked_seconds": times.blocked, "save_written_seconds": times.written}

    def _stop_if_asked(self, received: signal.Signals | None) -> None:
        """Ends the run after a signal, for which the last step was saved."""
        if received:
            self._checkpointer.wait()
            raise StoppedBySignal(received, self._last_checkpoint)

    @contextmanager
    def _save_errors(self, is_last: bool = False) -> Iterator[None]:
        """Says what went wrong in a save, and lets the run go on if it may."""
        try:
            yield
        except OSError as error:
            if is_last or self._options.on_save_error == "stop":
                raise
            logger.error(
                "NOT SAVED: %s\nTraining goes on without this checkpoint, as "
                "on_save_error=continue says",
                error,
            )

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on and is not weights."""
        record = {} if self._record is None else {RUN_KEY: dict(self._record)}
        return {
            **record,
            "optimizer": self._optimizer.state_dict(),
            "parameter_dtypes": [parameter.dtype for parameter in parameters_of(self._optimizer)],
            "lr_scheduler": self._schedule.state_dict(),
            "epochs_run": self.epochs_run,
            "steps_run": self.steps_run,
            "steps_in_epoch": self._steps_in_epoch,
            "seed": self._options.seed,
            "total_epochs": self._options.epochs,
            "max_steps_per_epoch": self._options.max_steps_per_epoch,
            "gradient_accumulation_steps": self._options.gradient_accumulation_steps,
            "dataloader": self._batches.state_dict(),
            "rng_state": self._rng_state(),
        }

    def _rng_state(self) -> Any:
        """Of each share, in a list if there are several."""
        states = self._share.of_each(rng_state(self._own_device))
        return states if len(states) > 1 else states[0]

    @property
    def _own_device(self) -> torch.device | None:
        """The only device that is this process's, if there are others; else all are."""
        return self._device if self._ranks.count > 1 else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where a saved run was. Call it before the schedule is made.

        The settings of the optimizer that the config gives count, not those that were saved. If
        the data or what makes a step has changed within an epoch, this epoch is begun anew;
        :func:`~checkpointing.training.check_resume` refuses it unless it is wanted.

        Raises:
            ConfigError: if the state lacks an entry or does not fit the optimizer.
        """
        missing = [key for key in self.state_dict() if key not in {*state, *_OPTIONAL}]
        if missing:
            raise ConfigError(
                f"the checkpoint cannot be resumed: its recipe state lacks {', '.join(missing)}; "
                "it was not written by one of these recipes, or has no recipe state. Train from "
                "its weights with resume_from_checkpoint=False"
            )
        if len(set(self._ranks.exchange((state["steps_run"], state["epochs_run"])))) > 1:
            raise ConfigError(
                "the processes of this run would resume from different checkpoints: all of them "
                "must see one output_dir, on storage that their machines share"
            )
        load_optimizer(self._optimizer, state["optimizer"], state.get("parameter_dtypes", ()))
        self.epochs_run = state["epochs_run"]
        self.steps_run = state["steps_run"]
        accumulated = state["gradient_accumulation_steps"]
        is_other = accumulated != self._options.gradient_accumulation_steps
        is_other = is_other or bool(self._batches.changed_since(state["dataloader"]))
        if is_other and state["steps_in_epoch"] > 0:
            print(f"epoch {self.epochs_run} is begun anew, since its steps are others than before")
        if is_other:
            self._batches.start_epoch(self.epochs_run)
        else:
            self._batches.load_state_dict(state["dataloader"])
            self._steps_in_epoch = state["steps_in_epoch"]
        self._load_rng_state(state["rng_state"])
        self._resumed = state

    def _load_rng_state(self, saved: Any) -> None:
        states = saved if isinstance(saved, list) else [saved]
        if len(states) == self._share.count:
            set_rng_state(states[self._share.rank], self._own_device)
            return
        logger.warning(
            "random numbers, such as those of dropout, go on from another seed: the rows were "
            "divided among %d processes when the checkpoint was saved, and are among %d now",
            len(states),
            self._share.count,
        )
        set_seed(self._options.seed + self._share.count * self.steps_run + self._share.rank)


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


def _shown(metrics: Mapping[str, float]) -> str:
    return ", ".join(text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics)


def clip_gradient(parameters: Sequence[Tensor], limit: float | None) -> Tensor:
    """Clips the gradient of all parameters together, and returns its L2 norm before that.

    Args:
        parameters: that have a gradient or none; they may lie in shards in several processes.
        limit: largest norm; ``None``: the gradient stays as it is.
    """
    norm = whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if limit is not None:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm


def check_finite(value: Tensor, what: str, step: int) -> None:
    """Makes sure that a step may be taken.

    Raises:
        NonFiniteLossError: if a value, such as the loss, is infinite or not a number.
    """
    if not torch.isfinite(value):
        raise NonFiniteLossError(
            f"the {what} of step {step} is {value.item()}; the step is not taken and nothing is "
            "saved. Lower optimizer.lr, set clip_grad_norm, or train in another dtype; the last "
            "checkpoint is as it was"
        )
