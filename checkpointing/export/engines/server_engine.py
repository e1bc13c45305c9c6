"""The HTTP servers of vLLM and SGLang, which load adapters from a directory."""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from checkpointing.errors import CheckpointingError, ConfigError, RemoteError
from checkpointing.export.directory import adapter_key, check_servable, write_adapter_stream
from checkpointing.export.engines.base import Completion, Sampling
from checkpointing.export.engines.dialects import Question, dialect_of
from checkpointing.export.engines.json_server import JsonServer
from checkpointing.export.stream import WeightStream
from checkpointing.nearest import hint
from checkpointing.storage.commit import remove_directory
from checkpointing.storage.manifest import MANIFEST_NAME

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Requests at a time; the server computes them together.
_AT_ONCE = 32
_Result = TypeVar("_Result")


class ServerEngine:
    """A running server of vLLM or SGLang.

    Adapters are written to a directory that the server sees too, and the server is told to load
    them. Each is called NAME-KEY, with a key that is made of its content, since servers keep what
    they have computed by the name of the adapter. When a new one is served, those of the same NAME
    are unloaded and their directories removed, also those of an earlier process. So two runs that
    share a server need different names.

    Args:
        url: such as ``http://localhost:8000``.
        kind: ``"vllm"`` or ``"sglang"``; ``None`` to ask the server.
        model: the served base; ``None`` for the server's first.
        directory: where adapters are written, each server's in a directory of its own.
        name: what the names of adapters begin with; letters, digits, ``.``, ``_`` and ``-``.
        server_directory: the same directory as the server sees it, if that is by another path.
        api_key: the server's.
        timeout: seconds to wait for an answer.

    Attributes:
        served: name of the adapter that is served; ``None`` for the base alone.
        replaced: names of the adapters that it took the place of.
        base: what the server calls the base.
        base_root: the repository or directory that the server loaded it from, if it says so.

    Raises:
        ConfigError: if an argument is wrong.
        RemoteError: if the server cannot be reached.
    """

    needs_tied_head = False
    # Of merged weights, which it does not take.
    dtype = torch.float32

    def __init__(
        self,
        url: str,
        kind: str | None,
        model: str | None,
        directory: str | Path,
        *,
        name: str = "policy",
        server_directory: str | Path | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name: {name!r} cannot be an adapter's; use letters, digits, '.', '_' and '-'"
            )
        self._server = JsonServer(url, api_key, timeout)
        own = re.sub(r"[^\w.-]", "_", urlsplit(url).netloc)
        self._directory = Path(directory).absolute() / own
        self._seen = Path(server_directory or self._directory.parent) / own
        self._versions = re.compile(rf"{re.escape(name)}-[0-9a-f]{{12}}")
        self._prefix = name
        self.version = -1
        self.served: str | None = None
        self.replaced: tuple[str, ...] = ()
        cards = self._cards()
        bases = {card["id"]: card for card in cards if not card.get("parent")}
        if not bases or (model is not None and model not in bases):
            told = "" if model is None else f" {model!r}, {hint(model, bases)}"
            raise ConfigError(f"{self._server.url}: serves no model{told}")
        self.base: str = next(iter(bases)) if model is None else model
        self.base_root = str(bases[self.base].get("root") or "")
        owner = bases[self.base].get("owned_by")
        self._dialect = dialect_of(kind, owner, self._server.url)

    @property
    def name(self) -> str:
        """The kind of the server and its URL."""
        return f"{self._dialect.name} at {self._server.url}"

    @property
    def request_model(self) -> str:
        """What a request to ``/v1/…`` gives as its model."""
        return self.base if self.served is None else self._dialect.model(self.base, self.served)

    def expected(self) -> Mapping[str, Sequence[int]] | None:
        """Servers do not tell."""
        return None

    def load_merged(self, stream: WeightStream) -> None:
        """Refuses them.

        Raises:
            ConfigError: always; says what can be done.
        """
        raise ConfigError(
            f"{self.name}: takes adapters while it runs, not merged weights; write them with "
            f"`tune export --merged --to dir --out DIR` and {self._dialect.merged}"
        )

    def load_adapter(self, stream: WeightStream) -> None:
        """Writes the adapter, has it loaded, and has older versions unloaded.

        Raises:
            ConfigError: if no engine serves an adapter of this kind.
            RemoteError: if the server does not load it; what it served before it still serves. Or
                if it does not unload an older one; the new one is served then.
            WriteError: if it cannot be written.
        """
        config = stream.adapter_config
        if config is None:
            raise ConfigError(f"{self.name}: a stream of merged weights is no adapter")
        check_servable(config)
        tensors = dict(stream)
        served = f"{self._prefix}-{adapter_key(stream, tensors)}"
        before = self._adapters()
        write_adapter_stream(stream, tensors, self._directory / served)
        if served not in before:
            try:
                self._load(served, config)
            except CheckpointingError:
                with suppress(CheckpointingError):
                    self._remove_unlisted()
                raise
        self.served, self.version = served, stream.version
        self.replaced = tuple(n for n in before if self._versions.fullmatch(n) and n != served)
        for name in self.replaced:
            self._unload(name)
        self._remove_unlisted()

    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """So many completions of each prompt, given as token ids.

        With a seed each has its own, so that they are the same each time as far as the server
        computes the same each time.

        Raises:
            RemoteError: if the server answers with an error.
        """
        prompt_of = [prompt for prompt in prompts for _ in range(samples)]
        first = sampling.seed or 0
        contents = self._answers(
            [
                self._dialect.sample(self.base, self.served, prompt, sampling, first + number)
                for number, prompt in enumerate(prompt_of)
            ]
        )
        written = [self._read(self._dialect.sampled, content) for content in contents]
        whole = [[*p, *w] for p, (w, values) in zip(prompt_of, written, strict=True) if not values]
        scored = iter(self.logprobs(whole))
        completions = []
        for prompt, (tokens, values) in zip(prompt_of, written, strict=True):
            values = values or next(scored)[len(prompt) - 1 :].tolist()
            completions.append(Completion(tuple(tokens), tuple(values), self.version))
        return [completions[i : i + samples] for i in range(0, len(completions), samples)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """fp32 ``[length - 1]`` for each sequence.

        Raises:
            RemoteError: if the server answers with an error, such as for a sequence that is as
                long as its context.
        """
        questions = [self._dialect.score(self.base, self.served, each) for each in sequences]
        contents = iter(self._answers([one for some in questions for one in some]))
        found = [
            self._read(self._dialect.scores, list(islice(contents, len(some))), tokens)
            for some, tokens in zip(questions, sequences, strict=True)
        ]
        return [torch.tensor(values, dtype=torch.float32) for values in found]

    def close(self) -> None:
        """Has the adapter unloaded, if the server is still there, and removes its directory."""
        if self.served is not None:
            with suppress(RemoteError):
                self._unload(self.served)
                self._remove_unlisted()
            self.served, self.version = None, -1

    def _load(self, served: str, config: Mapping[str, Any]) -> None:
        place = self._seen / served
        needs = (
            f"The server must be started on the adapter's base with {self._dialect.needs(config)}, "
            f"and it must see {place}"
        )
        body = {"lora_name": served, "lora_path": str(place)}
        answer = self._server.ask(self._dialect.load, body)
        if not answer.is_good:
            raise RemoteError(
                f"{self.name}: the adapter was not loaded, and what was served before still is; "
                f"the server answered {str(answer).rstrip('.')}. {needs}"
            )
        if served not in self._adapters():
            raise RemoteError(
                f"{self.name}: the adapter was loaded, but {served} is not in /v1/models, so that "
                f"requests might get the base alone. {needs}"
            )

    def _unload(self, name: str) -> None:
        answer = self._server.ask(self._dialect.unload, {"lora_name": name})
        if not answer.is_good and name in self._adapters():
            raise RemoteError(
                f"{self.name}: the adapter {name} was not unloaded, and takes memory there; the "
                f"server answered {answer}"
            )

    def _remove_unlisted(self) -> None:
        """Removes the directories of versions that the server has not."""
        if not self._directory.is_dir():
            return
        listed = self._adapters()
        for path in self._directory.iterdir():
            is_ours = self._versions.fullmatch(path.name) and (path / MANIFEST_NAME).is_file()
            if is_ours and path.name not in listed:
                remove_directory(path)

    def _adapters(self) -> list[str]:
        return [card["id"] for card in self._cards() if card.get("parent")]

    def _cards(self) -> list[dict[str, Any]]:
        """What the server says of each model and adapter that it serves."""
        answer = self._server.ask("/v1/models")
        data = answer.content.get("data") if isinstance(answer.content, dict) else None
        if not answer.is_good or not isinstance(data, list):
            raise RemoteError(
                f"{self._server.url}/v1/models: answered {answer}, and not with a list of models; "
                "give the URL of a server of vLLM or SGLang"
            )
        return [c for c in data if isinstance(c, dict) and isinstance(c.get("id"), str)]

    def _answers(self, questions: Sequence[Question]) -> list[Any]:
        def one(question: Question) -> Any:
            path, body = question
            answer = self._server.ask(path, body)
            if not answer.is_good:
                raise RemoteError(f"{self.name}: {path} answered {answer}")
            return answer.content

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(one, questions))

    def _read(self, read: Callable[..., _Result], *arguments: Any) -> _Result:
        try:
            return read(*arguments)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RemoteError(
                f"{self.name}: an answer is otherwise than is known here "
                f"({type(error).__name__}: {error}); see how the server was started, or use a "
                "newer release of it"
            ) from error
