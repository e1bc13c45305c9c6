"""A transformers model in the same process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.export.engines.base import Completion, Sampling
from checkpointing.export.stream import WeightStream

_PREFIX = "base_model.model."


class TransformersEngine:
    """A causal language model of transformers, as it is or wrapped by PEFT for adapters.

    Args:
        model: of the base that is trained; it is changed, so it must not share memory with the
            native model.
        pad_token_id: fills up shorter prompts, which are masked; any token will do.
    """

    name = "transformers"
    # Its head is the embedding, so that there is no copy to go stale.
    needs_tied_head = False

    def __init__(self, model: Any, pad_token_id: int = 0) -> None:
        from transformers import GenerationConfig

        self._model = model.eval()
        # What a checkpoint proposes for chats, such as a penalty on repetition, would draw from
        # another distribution than the model's.
        self._model.generation_config = GenerationConfig()
        self._pad = pad_token_id
        self._adapter: str | None = None
        # Of the adapter: its config, and its parameters by the names that PEFT saves them under.
        self._config: dict[str, Any] | None = None
        self._places: dict[str, Tensor] = {}
        self._is_whole = True
        self.version = -1
        self.dtype: torch.dtype = next(model.parameters()).dtype

    @property
    def _device(self) -> torch.device:
        found: torch.device = next(self._model.parameters()).device
        return found

    def expected(self) -> Mapping[str, Sequence[int]] | None:
        return {name: tuple(p.shape) for name, p in self._parameters().items()}

    def _parameters(self) -> dict[str, Tensor]:
        """Of the base, by its own names; a tied head is the embedding, and is named once."""
        self._check_plain()
        return dict(self._model.named_parameters())

    def _check_plain(self) -> None:
        if self._adapter is not None:
            raise ConfigError(
                "this engine holds an adapter; merged weights would get it twice: use one way of "
                "syncing for one engine"
            )

    @torch.no_grad()
    def load_merged(self, stream: WeightStream) -> None:
        """Copies the weights into the model's own.

        If the stream breaks off, the model holds two versions, and computes nothing until it has
        got another one whole.

        Raises:
            TensorMismatchError: lists all tensors that do not fit; none is copied then.
            ConfigError: if the engine holds an adapter.
        """
        own = self._parameters()
        stream.check_expected({name: tuple(p.shape) for name, p in own.items()}, self.name)
        self._is_whole = False
        for name, tensor in stream:
            own[name].copy_(tensor)
        self._is_whole = True
        self.version = stream.version

    @torch.no_grad()
    def load_adapter(self, stream: WeightStream) -> None:
        """Puts the adapter on the base; a later one of the same shape takes its place.

        Raises:
            TensorMismatchError: lists what PEFT has no place for, or has and does not get.
            ConfigError: if PEFT is not installed.
        """
        try:
            from peft import (
                LoraConfig,
                get_peft_model,
                get_peft_model_state_dict,
                set_peft_model_state_dict,
            )
        except ImportError as error:
            raise ConfigError("an adapter in transformers needs PEFT: pip install peft") from error

        assert stream.adapter_config is not None
        tensors = dict(stream)
        if self._takes(tensors, stream.adapter_config):
            for key, tensor in tensors.items():
                self._places[key].copy_(tensor)
            self.version = stream.version
            return
        name = f"version_{stream.version}"
        fields = {k: v for k, v in stream.adapter_config.items() if k not in ("peft_type",)}
        config = LoraConfig(**fields)
        try:
            if self._adapter is None:
                self._model = get_peft_model(self._model, config, adapter_name=name)
            else:
                self._model.add_adapter(name, config)
            result = set_peft_model_state_dict(self._model, tensors, adapter_name=name)
        except (RuntimeError, ValueError) as error:
            # PEFT's for names, and for shapes, that the base has not.
            if name in getattr(self._model, "peft_config", {}):
                self._drop(name)
            raise TensorMismatchError(
                "loading an adapter into transformers",
                [line.strip() for line in str(error).splitlines()],
                "Start the engine with the base that is trained here.",
            ) from error
        missing = [key for key in result.missing_keys if f".{name}" in key]
        if missing or result.unexpected_keys:
            self._drop(name)
            problems = [f"{key}: missing" for key in missing]
            problems += [f"{key}: PEFT has no place for it" for key in result.unexpected_keys]
            raise TensorMismatchError(
                "loading an adapter into transformers",
                problems,
                "Start the engine with the base that is trained here.",
            )
        self._model.set_adapter(name)
        if self._adapter is not None:
            self._model.delete_adapter(self._adapter)
        self._adapter = name
        self._model.eval()
        self.version = stream.version
        self._config = stream.adapter_config
        memory = {p.data_ptr(): p for p in self._model.parameters()}
        saved = get_peft_model_state_dict(self._model, adapter_name=name)
        self._places = {k: memory[t.data_ptr()] for k, t in saved.items() if t.data_ptr() in memory}

    def _takes(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
        """Whether an adapter can be copied over the one that the engine holds."""
        return (
            self._adapter is not None
            and config == self._config
            and {k: t.shape for k, t in tensors.items()}
            == {k: p.shape for k, p in self._places.items()}
        )

    def _drop(self, name: str) -> None:
        """Takes a refused adapter away, so that all is as it was."""
        if self._adapter is None:
            self._model = self._model.unload()
        else:
            self._model.set_adapter(self._adapter)
            self._model.delete_adapter(name)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Draws completions; with a seed they are the same each time, on one device."""
        self._check_whole()
        longest = max(map(len, prompts))
        rows = [[self._pad] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        ids = torch.tensor(rows, device=self._device)
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            options["top_k"] = sampling.top_k or 0
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=sampling.seed is not None):
            if sampling.seed is not None:
                torch.manual_seed(sampling.seed)
            output = self._model.generate(
                input_ids=ids.repeat_interleave(samples, 0),
                attention_mask=torch.tensor(mask, device=self._device).repeat_interleave(
                    samples, 0
                ),
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=self._pad,
                **options,
            )
        ends = set(sampling.stop_token_ids)
        written = [_until_end(row[longest:].tolist(), ends) for row in output]
        prompt_of = [prompt for prompt in prompts for _ in range(samples)]
        logprobs = self.logprobs([[*p, *w] for p, w in zip(prompt_of, written, strict=True)])
        completions = [
            Completion(tuple(tokens), tuple(values[len(prompt) - 1 :].tolist()), self.version)
            for prompt, tokens, values in zip(prompt_of, written, logprobs, strict=True)
        ]
        return [completions[i : i + samples] for i in range(0, len(completions), samples)]

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        self._check_whole()
        longest = max(map(len, sequences))
        rows = [[*s, *[self._pad] * (longest - len(s))] for s in sequences]
        mask = [[1] * len(s) + [0] * (longest - len(s)) for s in sequences]
        ids = torch.tensor(rows, device=self._device)
        logits = self._model(
            input_ids=ids, attention_mask=torch.tensor(mask, device=self._device)
        ).logits
        all_values = logits[:, :-1].float().log_softmax(-1)
        values = all_values.gather(-1, ids[:, 1:, None])[..., 0].cpu()
        return [row[: len(s) - 1] for row, s in zip(values, sequences, strict=True)]

    def _check_whole(self) -> None:
        if not self._is_whole:
            raise ConfigError(
                "transformers: a sync was cut short, so that the model holds two versions of the "
                "weights: sync it again before it computes"
            )

    def close(self) -> None:
        self._model = None


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
