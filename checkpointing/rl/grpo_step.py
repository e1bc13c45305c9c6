"""One step of GRPO: completions are drawn and rewarded, and the policy is updated on them."""

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from checkpointing.errors import ConfigError
from checkpointing.export.engines.base import Completion, Sampling
from checkpointing.rl.completion_batch import (
    CompletionBatch,
    completion_batch,
    completion_logprobs,
)
from checkpointing.rl.grpo import Objective, advantages, losses
from checkpointing.rl.prompts import Prompt
from checkpointing.rl.reward_function import RewardFunction
from checkpointing.rl.synced_engine import SyncedEngine
from checkpointing.training.adapter_switch import adapter_off
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.distributed import DataShare, job
from checkpointing.training.tokenizer import ChatTokenizer
from checkpointing.training.trainer import check_finite, clip_gradient


class GRPOStep:
    """What the trainer calls for each step, with the prompts of it.

    The sampling policy of the ratio is this model with the weights that the engine holds, at
    temperature 1, and not what the engine says of its own completions: so the ratio is exactly 1
    before the first update on fresh weights, however the engine rounds, and completions drawn with
    weights of an earlier step are weighted for what they are. What the engine says is compared with
    it in every step. Other settings of the sampling than temperature 1, top-p 1 and all tokens
    draw what the ratio does not account for.

    The reference is the same model with its adapter switched off.

    Several processes that train one model together each have a share of the prompts, with all
    completions of each; a step of all is that of one process with all prompts, up to rounding.

    Args:
        model: with an adapter without dropout, which is trained.
        optimizer: of the adapter.
        engine: draws the completions.
        tokenizer: of the model.
        reward: judges the completions.
        sampling: how completions are drawn. Its seed is set anew in each step, from the run's seed
            and the number of the step, so that a resumed run draws the same. Where it names no
            stop tokens, the tokenizer's end token is one.
        objective: settings of the loss.
        seed: of the run.
        group_size: completions of each prompt.
        num_policy_updates: optimizer steps on the completions of a step.
        forward_batch_size: completions in a pass through the model; ``None``: all.
        clip_grad_norm: largest L2 norm of the gradient of an update; ``None``: no limit.
        share: the part of the prompts that this process has.

    Raises:
        ConfigError: if a number is not possible, or nothing would end a completion.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        optimizer: Optimizer,
        engine: SyncedEngine,
        tokenizer: ChatTokenizer,
        reward: RewardFunction,
        sampling: Sampling,
        objective: Objective,
        seed: int,
        group_size: int,
        num_policy_updates: int = 1,
        forward_batch_size: int | None = None,
        clip_grad_norm: float | None = None,
        share: DataShare | None = None,
    ) -> None:
        if model.adapter_config is not None and model.adapter_config.dropout > 0:
            raise ConfigError(
                f"model.lora_dropout={model.adapter_config.dropout}: must be 0, since completions "
                "are drawn without it, and the ratio would compare two dropouts"
            )
        if group_size < 2:
            raise ConfigError(f"group_size={group_size}: must be at least 2, to be compared")
        if num_policy_updates < 1:
            raise ConfigError(f"num_policy_updates={num_policy_updates}: must be at least 1")
        if forward_batch_size is not None and forward_batch_size < 1:
            raise ConfigError(f"forward_batch_size={forward_batch_size}: must be at least 1")
        if sampling.seed is not None:
            raise ConfigError("sampling.seed: leave it out; it follows from seed and step")
        if not sampling.temperature > 0:
            raise ConfigError(
                f"sampling.temperature={sampling.temperature}: must be above 0, or all completions "
                "of a prompt are the same"
            )
        self._model = model
        self._optimizer = optimizer
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._engine = engine
        self._tokenizer = tokenizer
        self._reward = reward
        self._sampling = _with_stop_tokens(sampling, tokenizer)
        self._objective = objective
        self._seed = seed
        self._group_size = group_size
        self._updates = num_policy_updates
        self._forward_batch_size = forward_batch_size
        self._clip_grad_norm = clip_grad_norm
        self._share = share or DataShare()
        self._ranks = job()

    def __call__(self, group: list[Any], number: int) -> dict[str, float]:
        """Takes the step.

        Args:
            group: lists of prompts.
            number: of the step, counted from 1.

        Returns:
            Its numbers; those of several updates are means over them.

        Raises:
            RewardError: if the reward function fails.
            EngineDisagreesError: if the engine computes other log-probabilities than the model.
            NonFiniteLossError: if the training diverges.
        """
        started = time.perf_counter()
        lr = self._optimizer.param_groups[0]["lr"]
        prompts = [prompt for rows in group for prompt in rows]
        metrics = self._engine.sync_if_due(number - 1)
        drawn = self._draw(prompts, number)
        of_each = [prompt for prompt in prompts for _ in range(self._group_size)]
        with self._ranks.agreed():
            own_rewards = self._rewards(of_each, drawn)
        rewards = torch.cat(self._share.of_each(own_rewards))
        device = self._trained[0].device
        # Each process goes through the model as often as the one that has most.
        rows = max(self._share.of_each(len(drawn)))
        batch = completion_batch([prompt.tokens for prompt in of_each], drawn, device, rows)
        with torch.no_grad():
            with self._engine.weights():
                sampled = self._logprobs(batch)
            with adapter_off(self._model):
                reference = self._logprobs(batch)
        said = torch.tensor([each for completion in drawn for each in completion.logprobs])
        gap = self._engine.check(said, sampled[batch.mask].cpu())
        grouped = advantages(own_rewards, self._objective.normalize_by_std)
        advantage = F.pad(grouped.flatten().float(), (0, rows - len(drawn))).to(device)
        updates = [
            self._update(batch, sampled, reference, advantage, rewards.numel(), number)
            for _ in range(self._updates)
        ]
        written = int(self._share.total(batch.lengths.sum()))
        read = torch.tensor(sum(len(prompt.tokens) for prompt in of_each))
        tokens = written + int(self._share.total(read))
        return {
            "loss": _mean(updates, "loss"),
            "lr": float(lr),
            "grad_norm": _mean(updates, "grad_norm"),
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std().item(),
            "kl": _mean(updates, "kl"),
            "clip_share": _mean(updates, "clip_share"),
            "completion_length": written / rewards.numel(),
            "engine_gap": gap,
            **metrics,
            "tokens_per_second": tokens / (time.perf_counter() - started),
        }

    def _draw(self, prompts: list[Prompt], number: int) -> list[Completion]:
        seed = random.Random(f"{self._seed}, step {number}").getrandbits(31)
        tokens = [prompt.tokens for prompt in prompts]
        groups = self._engine.generate(tokens, self._group_size, replace(self._sampling, seed=seed))
        return [completion for group in groups for completion in group]

    def _rewards(self, prompts: list[Prompt], drawn: list[Completion]) -> Tensor:
        """fp64 ``[prompts, group]``."""
        ends = set(self._sampling.stop_token_ids)
        if not drawn:
            return torch.zeros(0, self._group_size, dtype=torch.float64)
        texts = [self._text(completion.tokens, ends) for completion in drawn]
        found = self._reward([p.text for p in prompts], texts, [p.row for p in prompts])
        return torch.tensor(found, dtype=torch.float64).view(-1, self._group_size)

    def _text(self, tokens: tuple[int, ...], ends: set[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token not in ends])

    def _chunks(self, batch: CompletionBatch) -> Iterator[tuple[int, int]]:
        count = len(batch.tokens)
        size = self._forward_batch_size or count
        return ((start, min(start + size, count)) for start in range(0, count, size))

    def _logprobs(self, batch: CompletionBatch) -> Tensor:
        parts = [
            completion_logprobs(self._model, batch.rows(*ends)) for ends in self._chunks(batch)
        ]
        return torch.cat(parts)

    def _update(
        self,
        batch: CompletionBatch,
        sampled: Tensor,
        reference: Tensor,
        advantage: Tensor,
        count: int,
        number: int,
    ) -> dict[str, float]:
        """One step of the optimizer on all completions; returns its numbers.

        Args:
            batch: the completions that this process has.
            sampled: their log-probabilities by the weights that they were drawn with.
            reference: the same by the reference.
            advantage: of each completion.
            count: number of the completions of all processes.
            number: of the step.
        """
        self._optimizer.zero_grad(set_to_none=True)
        tokens = self._share.total(batch.lengths.sum())
        loss, kl, clipped = (torch.zeros((), device=sampled.device) for _ in range(3))
        for start, stop in self._chunks(batch):
            some = batch.rows(start, stop)
            found = losses(
                completion_logprobs(self._model, some),
                sampled[start:stop],
                reference[start:stop],
                some.mask,
                advantage[start:stop],
                self._objective,
                self._sampling.max_new_tokens,
            )
            part = found.loss.sum() / count
            part.backward()
            loss += part.detach()
            kl += found.kl.sum() / tokens
            clipped += found.clipped.sum() / tokens
        loss, kl, clipped = (self._share.total(each) for each in (loss, kl, clipped))
        check_finite(loss, "loss", number)
        norm = clip_gradient(self._trained, self._clip_grad_norm)
        check_finite(norm, "gradient norm", number)
        self._optimizer.step()
        values = {"loss": loss, "grad_norm": norm, "kl": kl, "clip_share": clipped}
        return {name: value.item() for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw the same completions: the engine's weights.

        The sampler's state is the run's seed and the number of the step, which the trainer saves.
        """
        return {"engine": self._engine.state_dict(), "sampling": asdict(self._sampling)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved state; how completions are drawn is as this run's config says."""
        self._engine.load_state_dict(state["engine"])


def _with_stop_tokens(sampling: Sampling, tokenizer: ChatTokenizer) -> Sampling:
    if sampling.stop_token_ids:
        return replace(sampling, stop_token_ids=tuple(sampling.stop_token_ids))
    if tokenizer.end_id is None:
        raise ConfigError(
            "the tokenizer names no eos_token, which would end a completion: give the ids of the "
            "tokens that do in sampling.stop_token_ids"
        )
    return replace(sampling, stop_token_ids=(tokenizer.end_id,))


def _mean(updates: list[dict[str, float]], name: str) -> float:
    return sum(update[name] for update in updates) / len(updates)
