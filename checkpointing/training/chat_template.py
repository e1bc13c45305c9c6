"""Chat templates, rendered in the sandbox and with the helpers that transformers gives them."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpointing.errors import ConfigError, CorruptCheckpointError

Messages = Sequence[Mapping[str, str]]


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what an assistant says; the text itself is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A Jinja template that writes a conversation as one text.

    Args:
        source: of the template.
        special_tokens: variables of the template, such as ``bos_token``.
        where: named in errors.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        helpers: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        environment.globals.update(helpers)
        self._where = where
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CorruptCheckpointError(f"{where}: not a Jinja template: {error}") from error

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with what comes before an assistant's answer.

        Raises:
            ConfigError: if the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of {self._where} refuses the messages with roles "
                f"{[message['role'] for message in messages]}: {error}"
            ) from error


def read_chat_template(directory: Path) -> ChatTemplate:
    """The chat template of a Hugging Face directory.

    It is read from ``chat_template.jinja``, else from ``chat_template`` in
    ``tokenizer_config.json`` (a text, or a list of which the one named ``default`` counts).

    Raises:
        ConfigError: if the directory has none.
        CorruptCheckpointError: if a file cannot be read.
    """
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = read_special_tokens(directory)
    file = directory / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text("utf-8"), special_tokens, str(file))
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"{directory} has no chat template, so a conversation cannot be written as text. "
            "Set tokenizer.path to the directory of an instruction-tuned model of the same family "
            "and vocabulary, or put a chat_template.jinja there"
        )
    return ChatTemplate(template, special_tokens, str(directory / "tokenizer_config.json"))


def read_special_tokens(directory: Path) -> dict[str, str]:
    """The texts of ``bos_token``, ``eos_token`` … as the tokenizer's config files name them."""
    named = {
        **_read_json(directory / "special_tokens_map.json"),
        **_read_json(directory / "tokenizer_config.json"),
    }
    special = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return special


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path}: not a JSON object")
    return content
