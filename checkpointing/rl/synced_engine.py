"""A rollout engine that gets the weights of the model that is trained, every few steps."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import CheckpointingError, ConfigError
from checkpointing.export.engines.base import WAYS, Completion, RolloutEngine, Sampling, sync
from checkpointing.mapping.tensors import is_dtensor
from checkpointing.nearest import hint
from checkpointing.training.decoder import TransformerDecoder
from checkpointing.training.distributed import DataShare, job
from checkpointing.training.lora import adapter_state_dict, base_state_dict, load_adapter
from checkpointing.training.rng import rng_state, set_rng_state

# Mean difference of the log-probabilities of sampled tokens. Weights that are one step too old, a
# head that is not tied or an adapter that is added twice are beyond it in fp32; the wider dtypes
# are told apart from the gross mistakes alone.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


class EngineDisagreesError(CheckpointingError, RuntimeError):
    """An engine does not compute what the model computes whose weights it was given."""


class SyncedEngine:
    """Keeps an engine at the weights that a model had after every so many steps.

    The number of a step decides alone when the engine is synced and which version it gets. Between
    two syncs the engine's weights are older than the model's; the adapter that they are made of is
    kept, so that the model can compute with it, and a resumed run gives the engine the same again.
    The random numbers of the run are not touched by what an engine does in the same process.

    Several processes that train one model together have one engine, in one of them, which draws
    for all the same as it would for one process that trains alone. All must call each method at the
    same time.

    Args:
        engine: started with the base that is trained; ``None`` in the processes that have none.
        model: with an adapter.
        way: ``"merged"`` or ``"adapter"``.
        every: steps between two syncs.
        base: repository or directory of the base, for an adapter's config.
        share: the part of the prompts that this process has.

    Raises:
        ConfigError: if the way is unknown, ``every`` is below 1, or there is not just one engine.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        model: TransformerDecoder,
        way: str = "merged",
        every: int = 1,
        base: str | Path | None = None,
        share: DataShare | None = None,
    ) -> None:
        if way not in WAYS:
            raise ConfigError(f"sync={way}: {hint(str(way), WAYS)}")
        if every < 1:
            raise ConfigError(f"sync_every={every}: must be at least 1")
        self._ranks = job()
        own = None if engine is None else (engine.name, engine.dtype, engine.version < 0)
        engines = [one for one in self._ranks.exchange(own) if one is not None]
        if len(engines) != 1:
            raise ConfigError(
                f"engine: {len(engines)} of the processes have one; just one of them draws for all"
            )
        self._name, self._engine_dtype, self._is_new = engines[0]
        self._share = share or DataShare()
        self._engine = engine
        self._model = model
        self._dtype = base_state_dict(model)["tok_embeddings.weight"].dtype
        self._way = way
        self._every = every
        self._base = base
        self._version = -1
        self._held: dict[str, Tensor] = {}

    def sync_if_due(self, steps: int) -> dict[str, float]:
        """Syncs the engine, or gives it the weights again that it had when the run was saved.

        Args:
            steps: that the model was trained.

        Returns:
            What a sync that was due cost (``sync_seconds``) and, of merged weights, what rounding
            left of the update: ``sync_changed``, the share of its elements that differ from the
            base, and ``sync_lost``, the norm of what is lost divided by that of the update.
        """
        if steps % self._every == 0 or (self._is_new and not self._held):
            self._version = steps
            if self._every > 1:
                own = adapter_state_dict(self._model)
                self._held = {name: tensor.clone() for name, tensor in own.items()}
            else:
                self._held = {}
            return self._send()
        if self._is_new:
            with self.weights():
                self._send()
        return {}

    def _send(self) -> dict[str, float]:
        started = time.perf_counter()
        with _own_random_numbers():
            stream = sync(self._model, self._engine, self._way, self._version, self._base)
        self._is_new = False
        metrics = {"sync_seconds": time.perf_counter() - started}
        survival = stream.survival
        if survival is not None:
            metrics["sync_changed"] = survival.changed_share
            metrics["sync_lost"] = survival.lost_norm
        return metrics

    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """So many completions of each prompt, by the weights of the last sync."""
        shares = self._share.of_each(list(prompts))
        count = len(shares)
        # In the order of the batch that they are parts of.
        of_all = [shares[i % count][i // count] for i in range(sum(map(len, shares)))]
        with self._ranks.agreed():
            own = (
                None
                if self._engine is None
                else self._drawn(self._engine, of_all, samples, sampling)
            )
            drawn = next(one for one in self._ranks.exchange(own) if one is not None)
        return drawn[self._share.rank :: count]

    def _drawn(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Sequence[int]],
        samples: int,
        sampling: Sampling,
    ) -> list[list[Completion]]:
        with _own_random_numbers():
            drawn = engine.generate(prompts, samples, sampling)
        versions = {each.version for group in drawn for each in group}
        if versions != {self._version}:
            raise EngineDisagreesError(
                f"{self._name} wrote with weights of version {sorted(versions)}, and was "
                f"given {self._version}: is another run using the same engine?"
            )
        return drawn

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The model computes with the weights that the engine holds while the block runs."""
        if not self._held:
            yield
            return
        own = {name: tensor.clone() for name, tensor in adapter_state_dict(self._model).items()}
        self._put(self._held)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, adapter: Mapping[str, Tensor]) -> None:
        """Copies tensors into the model's adapter: whole ones, or in shards as those are."""
        if not any(map(is_dtensor, adapter.values())):
            load_adapter(self._model, adapter)
            return
        for name, parameter in adapter_state_dict(self._model).items():
            parameter.copy_(adapter[name])

    def check(self, engine: Tensor, model: Tensor) -> float:
        """Compares what the engine says of some tokens with what its weights give here.

        Args:
            engine: fp32 ``[tokens]``, log-probabilities by the engine of the tokens that this
                process has.
            model: the same by the model.

        Returns:
            Mean of the absolute differences, over the tokens of all processes.

        Raises:
            EngineDisagreesError: if it is above what their dtypes explain.
        """
        dtypes = {self._engine_dtype, self._dtype}
        tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
        differences = torch.cat(self._share.of_each((engine - model).abs()))
        mean = differences.mean().item()
        if not mean <= tolerance:
            raise EngineDisagreesError(
                f"after the sync of version {self._version} (sync={self._way}) the log-"
                f"probabilities of {self._name} differ from the model's by {mean:.2g} in "
                f"the mean and {differences.max():.2g} at most, over {len(differences)} tokens; "
                f"{', '.join(sorted(map(str, dtypes)))} explain {tolerance:g}. Nothing was trained "
                "on these completions. Start the engine with the base that is trained here, "
                "without other adapters, or sync the other way"
            )
        return mean

    def close(self) -> None:
        """Frees what the engine holds."""
        if self._engine is not None:
            self._engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Which weights the engine holds; the adapter, if the model's may be newer."""
        return {"version": self._version, "adapter": dict(self._held)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a saved state; the engine gets its weights with the next step."""
        self._version = state["version"]
        self._held = dict(state["adapter"])


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
