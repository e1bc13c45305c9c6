"""vLLM in the same process."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from checkpointing.convert import ModelToWrite, plan_conversion
from checkpointing.errors import CheckpointingError, ConfigError, TensorMismatchError
from checkpointing.export.directory import check_servable, write_adapter_stream
from checkpointing.export.engines.base import Completion, Sampling
from checkpointing.export.stream import WeightStream
from checkpointing.families import FAMILIES
from checkpointing.mapping.tensors import shapes_of
from checkpointing.mapping.ties import tied_names

_PREFIX = "base_model.model."
# PEFT's tensors of an adapter, and which dimension of the base's weight their own one is.
_SIDES = {
    ".lora_A.weight": (1, 1),
    ".lora_B.weight": (0, 0),
    ".lora_embedding_A": (1, 0),
    ".lora_embedding_B": (0, 1),
}


class UnusableEngineError(CheckpointingError, RuntimeError):
    """An engine holds some of the new weights and some of the old ones."""


class VLLMEngine:
    """A ``vllm.LLM`` that runs in this process; written for vLLM 0.32.

    Set ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` in the environment before vLLM is imported, so that
    tensors are handed over as they are.

    Args:
        llm: of the base that is trained, as nobody else uses it; with ``enable_lora=True`` and a
            ``max_lora_rank`` for adapters. What its prefix cache holds is forgotten at every sync.

    Raises:
        ConfigError: if it runs in other processes, quantises its weights, or gives other logprobs
            than those at temperature 1; if its base is not on this machine.
        CheckpointingError: if its base cannot be read.
    """

    name = "vLLM"

    def __init__(self, llm: Any) -> None:
        config = llm.llm_engine.vllm_config
        _check_usable(llm, config)
        self._llm = llm
        self._takes_adapters = config.lora_config is not None
        self.dtype: torch.dtype = config.model_config.dtype
        is_tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
        # vLLM shares the memory of a tied head; on processors it also keeps a packed copy of it,
        # which only a head that is sent replaces. Some models have the embedding alone.
        (has_head,) = llm.apply_model(_has_head)
        self.needs_tied_head = is_tied and has_head
        base = _base_of(config.model_config, is_tied)
        self._shapes = _shapes_of(base, self.needs_tied_head)
        assert base.base.config is not None  # it has a config.json
        self._has_experts = base.base.config.dims.experts > 0
        self._is_on_cpu = config.device_config.device_type == "cpu"
        self._has_merged = False
        self._is_half_loaded = False
        self._adapter: tuple[Any, tempfile.TemporaryDirectory[str]] | None = None
        self._adapters = 0
        self.version = -1

    def expected(self) -> Mapping[str, Sequence[int]] | None:
        return self._shapes

    def load_merged(self, stream: WeightStream) -> None:
        """Takes all weights.

        If it raises after the first tensor, nothing is computed until all weights of a later stream
        have come.

        Raises:
            TensorMismatchError: lists all tensors that vLLM would leave out or not get; none is
                taken then.
            ConfigError: if it holds an adapter, is at work, or the stream was read already; nothing
                is taken then.
            UnusableEngineError: if the stream was closed.
        """
        self._check_merged(stream)
        stream.check_expected(self._shapes, self.name)
        self._forget_prefixes()
        if self._is_half_loaded:
            # vLLM still has what came before the error; it drops that at the end of a load.
            self._reload(())
        self._is_half_loaded = self._has_merged = True
        self._reload(stream)
        if not stream.is_complete:
            raise UnusableEngineError(f"{self.name}: the stream was closed before its end")
        self._is_half_loaded = False
        self.version = stream.version

    def load_adapter(self, stream: WeightStream) -> None:
        """Puts the adapter on the base; the one before it is removed.

        If it raises, the adapter before it, or the base, is still computed with.

        Raises:
            TensorMismatchError: lists all tensors that do not fit the base, or that vLLM does not
                compute with.
            ConfigError: if vLLM was not started for adapters, computes no adapter of this kind,
                holds merged weights, or is at work.
            WriteError: if the adapter's directory cannot be written.
        """
        from vllm.lora.request import LoRARequest

        self._check_adapter(stream)
        self._forget_prefixes()
        engine = self._llm.llm_engine
        # vLLM caches by the name; ids that somebody else has given are left alone.
        self._adapters = max(self._adapters, *engine.list_loras(), 0) + 1
        place = tempfile.TemporaryDirectory(prefix="tunepoint-adapter-")
        directory = Path(place.name, f"version_{stream.version}")
        try:
            write_adapter_stream(stream, dict(stream), directory)
            request = LoRARequest(directory.name, self._adapters, str(directory))
            self._add(request)
        except BaseException:
            place.cleanup()
            raise
        self._remove_adapter()
        self._adapter = request, place
        self.version = stream.version

    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Draws completions; with a seed they are the same each time, and others for each."""
        first = sampling.seed
        own: dict[str, Any] = {
            "n": samples,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "stop_token_ids": list(sampling.stop_token_ids),
            # What ends a completion is what was asked for, not what the model's config says.
            "ignore_eos": True,
            "logprobs": 0,
        }
        seeds = None if first is None else [first + i * samples for i in range(len(prompts))]
        outputs = self._ask(prompts, own, seeds)
        return [[self._completion(each) for each in output.outputs] for output in outputs]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """fp32 ``[length - 1]`` for each sequence, which must be shorter than the context."""
        own = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        # vLLM computes the head of all tokens of a prompt with the adapter of each *request*, which
        # fails for several at a time (0.32, processors).
        at_once = 1 if self._takes_adapters else max(len(sequences), 1)
        outputs = [
            output
            for start in range(0, len(sequences), at_once)
            for output in self._ask(sequences[start : start + at_once], own)
        ]
        return [
            torch.tensor(_logprobs(output.prompt_logprobs[1:], tokens[1:]), dtype=torch.float32)
            for output, tokens in zip(outputs, sequences, strict=True)
        ]

    def close(self) -> None:
        """Removes the adapter; the ``LLM`` is its owner's to end."""
        self._remove_adapter()
        self._llm = None

    def _check_merged(self, stream: WeightStream) -> None:
        if stream.is_complete or stream.digests:
            raise ConfigError(f"{self.name}: the stream was read already; make another one")
        if self._adapter is not None:
            raise ConfigError(
                "this engine holds an adapter; merged weights would get it twice: use one way of "
                "syncing for one engine"
            )
        if self._has_experts and self._is_on_cpu:
            raise ConfigError(
                f"{self.name}: on processors it takes new weights of experts, and computes with "
                "wrong ones then (0.32); start it again on a directory of the merged weights"
            )
        other = [n for n, meta in stream.metas.items() if meta.dtype != self.dtype]
        if other:
            raise ConfigError(
                f"{self.name}: computes in {self.dtype}, and {other[0]} (and {len(other) - 1} "
                f"more) is {stream.metas[other[0]].dtype}; give merged_stream dtype={self.dtype}"
            )

    def _check_adapter(self, stream: WeightStream) -> None:
        if stream.adapter_config is None:
            raise ConfigError(f"{self.name}: a stream of merged weights is no adapter")
        if not self._takes_adapters:
            rank = stream.adapter_config["r"]
            raise ConfigError(
                f"{self.name}: was not started for adapters; give LLM enable_lora=True and a "
                f"max_lora_rank of at least {rank}"
            )
        if self._has_merged:
            raise ConfigError(
                "this engine holds merged weights; the adapter would be added to them: use one way "
                "of syncing for one engine"
            )
        check_servable(stream.adapter_config)
        if problems := _misfits(stream, self._shapes):
            raise TensorMismatchError(
                f"{self.name}: an adapter of another base",
                problems,
                "Start the engine with the base that is trained here; nothing was sent.",
            )

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise ConfigError(
                f"{self.name}: is at work; sync when all that it was asked for is answered"
            )

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def _add(self, request: Any) -> None:
        """Loads an adapter, and checks that vLLM computes with all of it."""
        self._llm.llm_engine.add_lora(request)
        (unused,) = self._llm.collective_rpc(_unused_modules, args=(request.lora_int_id,))
        if unused:
            self._llm.llm_engine.remove_lora(request.lora_int_id)
            raise TensorMismatchError(
                "loading an adapter into vLLM",
                [f"{module}: vLLM does not compute with an adapter there" for module in unused],
                "Start the engine with the base that is trained here, or send merged weights.",
            )

    def _remove_adapter(self) -> None:
        if self._adapter is not None:
            request, place = self._adapter
            self._llm.llm_engine.remove_lora(request.lora_int_id)
            place.cleanup()
            self._adapter = None

    def _ask(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Mapping[str, Any],
        seeds: Sequence[int] | None = None,
    ) -> Any:
        from vllm import SamplingParams

        if self._is_half_loaded:
            raise UnusableEngineError(
                f"{self.name}: the last sync broke off, so that it holds weights of two versions; "
                "sync again, to the end"
            )
        seed_of: Sequence[int | None] = seeds or [None] * len(prompts)
        try:
            return self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                [SamplingParams(**settings, seed=seed, detokenize=False) for seed in seed_of],
                lora_request=None if self._adapter is None else self._adapter[0],
                use_tqdm=False,
            )
        except BaseException:
            # What is left would be answered together with what is asked next.
            engine = self._llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    def _completion(self, output: Any) -> Completion:
        tokens = tuple(output.token_ids)
        return Completion(tokens, tuple(_logprobs(output.logprobs, tokens)), self.version)


def _check_usable(llm: Any, config: Any) -> None:
    if not hasattr(llm.llm_engine, "model_executor") or config.parallel_config.world_size > 1:
        raise ConfigError(
            "vLLM: runs in other processes, which cannot take tensors from this one; set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment before vllm is imported, and use "
            "one device"
        )
    model = config.model_config
    if model.quantization is not None:
        raise ConfigError(
            f"vLLM: quantises its weights ({model.quantization}), so that it computes otherwise "
            "than what is trained; start it without"
        )
    if model.logprobs_mode != "raw_logprobs":
        raise ConfigError(
            f"vLLM: gives {model.logprobs_mode}; start it with logprobs_mode='raw_logprobs', which "
            "are those of the policy at temperature 1"
        )


def _base_of(config: Any, is_tied: bool) -> ModelToWrite:
    """The headers of the files that the engine was started from.

    vLLM's own parameters are fused, padded and packed, and do not tell what it takes.
    """
    directory = Path(config.model)
    if not directory.is_dir():
        try:
            cached = snapshot_download(
                config.model, revision=config.revision, local_files_only=True
            )
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
            raise ConfigError(
                f"vLLM: its base {config.model} is neither a directory nor in the Hub's cache, so "
                "that it cannot be told which tensors it has; start it with a directory"
            ) from error
        directory = Path(cached)
    base = plan_conversion(directory, "hf")
    if is_tied and base.base.config is not None and not base.base.config.dims.tied:
        raise ConfigError(
            f"{directory}: config.json says that the embeddings are tied, and the head differs "
            "from them; vLLM would compute with one of both: set tie_word_embeddings to false"
        )
    return base


def _shapes_of(base: ModelToWrite, with_tied_head: bool) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that the engine takes, by transformers' name."""
    shapes = shapes_of(base.tensors)
    if with_tied_head:
        head, embedding = tied_names(FAMILIES[base.facts["family"]], "hf")
        shapes[head] = shapes[embedding]
    return shapes


def _has_head(model: Any) -> bool:
    """Run by vLLM's worker: whether its model has a head of its own."""
    modules = model.named_modules(remove_duplicate=False)
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in modules)


def _misfits(stream: WeightStream, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """What of an adapter does not fit the base. vLLM takes smaller tensors than its own."""
    problems = []
    for name, meta in stream.metas.items():
        side = next((side for side in _SIDES if name.endswith(side)), None)
        if side is None:
            continue
        module = name.removeprefix(_PREFIX).removesuffix(side)
        base = shapes.get(f"{module}.weight")
        dim, base_dim = _SIDES[side]
        if base is None:
            # Of experts that are stored together there is no tensor of its own.
            if ".experts." not in name:
                problems.append(f"{name}: the engine has no such module")
        elif meta.shape[dim] != base[base_dim]:
            problems.append(f"{name}: {list(meta.shape)}, and the engine's weight is {list(base)}")
    return problems


def _unused_modules(worker: Any, adapter_id: int) -> list[str]:
    """Run by vLLM's worker: modules of a loaded adapter that are none of the model's."""
    manager = worker.model_runner.lora_manager._adapter_manager
    loaded = manager.get_adapter(adapter_id).loras
    return sorted(set(loaded) - set(manager.modules)) if loaded else ["all of the model"]


def _logprobs(steps: Sequence[Mapping[int, Any]], tokens: Sequence[int]) -> list[float]:
    return [float(step[token].logprob) for step, token in zip(steps, tokens, strict=True)]
