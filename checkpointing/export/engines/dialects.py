"""How the servers of vLLM and SGLang are asked, and what they answer.

vLLM: https://docs.vllm.ai/en/latest/features/lora and ``serving/openai_compatible_server``.
SGLang: https://docs.sglang.io/docs/advanced_features/lora and ``basic_usage/sampling_params``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from checkpointing.errors import ConfigError
from checkpointing.export.engines.base import Sampling
from checkpointing.nearest import hint

# What vLLM takes for --max-lora-rank.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_ONE = {"max_tokens": 1, "temperature": 0.0}

Question = tuple[str, dict[str, Any]]
"""A path, and the JSON that is posted there."""


class Dialect(Protocol):
    """One kind of server.

    Attributes:
        name: of the kind.
        load: path that an adapter is loaded by; it is told a name and a directory.
        unload: path that an adapter is unloaded by; it is told a name.
        merged: how the server can get merged weights.
    """

    name: str
    load: str
    unload: str
    merged: str

    def needs(self, config: Mapping[str, Any]) -> str:
        """What the server must be started with to take an adapter, given PEFT's config of it."""

    def model(self, base: str, adapter: str) -> str:
        """What a request to ``/v1/…`` gives as its model."""

    def score(self, base: str, adapter: str | None, tokens: Sequence[int]) -> list[Question]:
        """Asks for the logprobs of given tokens."""

    def scores(self, contents: Sequence[Any], tokens: Sequence[int]) -> list[float]:
        """The logprobs of all tokens but the first, given the answers.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: if they are not in the answers.
        """

    def sample(
        self, base: str, adapter: str | None, prompt: Sequence[int], sampling: Sampling, seed: int
    ) -> Question:
        """Asks for one completion; the seed counts only where the sampling has one."""

    def sampled(self, content: Any) -> tuple[list[int], list[float] | None]:
        """The tokens of the completion, and their logprobs if these are those at temperature 1.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: if they are not in the answer.
        """


class VLLM:
    """vLLM's OpenAI server; one that knows ``return_token_ids``.

    Given tokens are scored by letting it draw each of them, as one of one: what it offers for
    prompts (``prompt_logprobs``) leaves out what an adapter adds to the output projection, or
    ends the server (https://github.com/vllm-project/vllm/issues/16668 and 51594).
    """

    name = "vLLM"
    load = "/v1/load_lora_adapter"
    unload = "/v1/unload_lora_adapter"
    merged = "start it again on that directory (`vllm serve DIR`)"

    def needs(self, config: Mapping[str, Any]) -> str:
        rank = config["r"]
        most = next((each for each in _VLLM_RANKS if each >= rank), rank)
        return (
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, --enable-lora and "
            f"--max-lora-rank {most} or more"
        )

    def model(self, base: str, adapter: str) -> str:
        return adapter

    def score(self, base: str, adapter: str | None, tokens: Sequence[int]) -> list[Question]:
        return [
            self._complete(base, adapter, tokens[:place], allowed_token_ids=[token], **_ONE)
            for place, token in enumerate(tokens)
            if place
        ]

    def scores(self, contents: Sequence[Any], tokens: Sequence[int]) -> list[float]:
        found = [self.sampled(content) for content in contents]
        if [drawn for drawn, _ in found] != [[token] for token in tokens[1:]]:
            raise ValueError("other tokens")
        values = [value for _, (value,) in found]
        if values and (max(values) > 0 or not any(values)):
            raise ValueError("no raw logprobs; start it with --logprobs-mode raw_logprobs")
        return values

    def sample(
        self, base: str, adapter: str | None, prompt: Sequence[int], sampling: Sampling, seed: int
    ) -> Question:
        return self._complete(
            base,
            adapter,
            prompt,
            max_tokens=sampling.max_new_tokens,
            seed=None if sampling.seed is None else seed,
            stop_token_ids=list(sampling.stop_token_ids),
            **_drawing(sampling),
        )

    def sampled(self, content: Any) -> tuple[list[int], list[float]]:
        choice = content["choices"][0]
        values = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        return [int(token) for token in choice["token_ids"]], values

    def _complete(
        self, base: str, adapter: str | None, prompt: Sequence[int], **settings: Any
    ) -> Question:
        # What ends a completion is what was asked for, not what the model's config says.
        body = {"ignore_eos": True, "return_token_ids": True, "logprobs": 0, **settings}
        return "/v1/completions", {"model": adapter or base, "prompt": list(prompt), **body}


class SGLang:
    """SGLang's server; one that lists adapters in ``/v1/models``.

    It does not run on every machine, and is tested here by a server that answers as its
    documentation says; vLLM's is tested itself.

    Its own ``/generate`` is asked, since it takes and gives token ids. Seeds count if it was
    started with ``--enable-deterministic-inference``. Where tokens are named that end a completion,
    the model's own do so too.
    """

    name = "SGLang"
    load = "/load_lora_adapter"
    unload = "/unload_lora_adapter"
    merged = (
        "start it again on that directory (--model-path DIR), or POST "
        '{"model_path": "DIR"} to its /update_weights_from_disk'
    )

    def needs(self, config: Mapping[str, Any]) -> str:
        targets = dict.fromkeys(each.rpartition(".")[2] for each in config["target_modules"])
        return (
            f"--enable-lora --max-lora-rank {config['r']} --lora-target-modules {' '.join(targets)}"
        )

    def model(self, base: str, adapter: str) -> str:
        return f"{base}:{adapter}"

    def score(self, base: str, adapter: str | None, tokens: Sequence[int]) -> list[Question]:
        body = {
            "input_ids": list(tokens),
            "lora_path": adapter,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return [("/generate", body)]

    def scores(self, contents: Sequence[Any], tokens: Sequence[int]) -> list[float]:
        # [logprob, token, text] of each token; the first has no logprob.
        found = contents[0]["meta_info"]["input_token_logprobs"]
        if [each[1] for each in found] != list(tokens):
            raise ValueError("other tokens")
        return [float(each[0]) for each in found[1:]]

    def sample(
        self, base: str, adapter: str | None, prompt: Sequence[int], sampling: Sampling, seed: int
    ) -> Question:
        settings = {
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            # It would ignore the tokens above too.
            "ignore_eos": not sampling.stop_token_ids,
            **_drawing(sampling),
        }
        if sampling.seed is not None:
            settings["sampling_seed"] = seed
        body = {"input_ids": list(prompt), "lora_path": adapter, "sampling_params": settings}
        return "/generate", {**body, "return_logprob": True}

    def sampled(self, content: Any) -> tuple[list[int], None]:
        # The logprobs here are divided by the temperature.
        return [int(each[1]) for each in content["meta_info"]["output_token_logprobs"]], None


def _drawing(sampling: Sampling) -> dict[str, Any]:
    """How tokens are drawn; all of it, since servers have defaults of the model's own."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


DIALECTS: dict[str, Dialect] = {"vllm": VLLM(), "sglang": SGLang()}
"""By the names that commands take, which are what a server's list of models says owns them."""


def dialect_of(kind: str | None, owner: Any, url: str) -> Dialect:
    """The kind of a server.

    Args:
        kind: as it was told, ``None`` if the server is to tell it.
        owner: what the server's list of models says owns them.
        url: of the server, for errors.

    Raises:
        ConfigError: if there is no such kind, or it is not told.
    """
    if kind is not None and kind not in DIALECTS:
        raise ConfigError(f"kind of server: {kind!r} is unknown, {hint(kind, DIALECTS)}")
    if kind is None and owner not in DIALECTS:
        raise ConfigError(
            f"{url}: its models are owned by {owner!r}, which does not tell the kind of server; "
            f"say which: {' or '.join(DIALECTS)}"
        )
    if kind is not None and owner in DIALECTS and owner != kind:
        raise ConfigError(f"{url}: is a server of {DIALECTS[owner].name}, not {kind}")
    return DIALECTS[owner if kind is None else kind]
