"""Requests to a server that speaks JSON over HTTP."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from checkpointing.errors import ConfigError, RemoteError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SHOWN = 600


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        status: of HTTP.
        content: what its JSON says, or its text if it is none.
    """

    status: int
    content: Any

    @property
    def is_good(self) -> bool:
        """The server did what it was asked."""
        return 200 <= self.status < 300

    def __str__(self) -> str:
        return f"{self.status}: {' '.join(_message(self.content).split())[:_SHOWN]}"


def _message(content: Any) -> str:
    """What an error says, in the forms of vLLM, SGLang and FastAPI."""
    if isinstance(content, dict):
        for key in ("error", "error_message", "message", "detail"):
            if content.get(key):
                return _message(content[key])
    return content if isinstance(content, str) else json.dumps(content)


class JsonServer:
    """A server.

    Args:
        url: such as ``http://localhost:8000``; ``/v1`` at its end is left out.
        api_key: sent as a bearer token, to this server alone.
        timeout: seconds to wait for an answer.

    Raises:
        ConfigError: if the URL is none of a server.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        _check_url(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key.strip()}"
        direct = [ProxyHandler({})] if urlsplit(url).hostname in _LOOPBACK else []
        self._opener = build_opener(_NoRedirects, *direct)

    def ask(self, path: str, body: Any = None) -> Answer:
        """Sends a GET, or with a body a POST.

        Raises:
            RemoteError: if the server cannot be reached or refuses access.
        """
        url = self.url + path
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(Request(url, data, self._headers), timeout=self._timeout) as got:
                answer = Answer(got.status, _parsed(got.read()))
        except HTTPError as error:
            with error:
                answer = Answer(error.code, _parsed(error.read()))
        except TimeoutError as error:
            raise RemoteError(
                f"{url}: no answer within {self._timeout:g} s; see what the server does, or wait "
                "longer"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(
                f"{url}: cannot be reached: {_reason(error)}; start the server, or correct the URL"
            ) from error
        if answer.status in (401, 403):
            raise RemoteError(f"{url}: access was refused ({answer}); give the server's API key")
        return answer


class _NoRedirects(HTTPRedirectHandler):
    """A redirection is an answer like others: whoever it leads to must not get the API key."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        has_more = parts.username or parts.query or parts.fragment
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and not has_more
        _ = parts.port  # raises if it is none
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(f"{url!r} is no server's URL; give one such as http://localhost:8000")


def _reason(error: Exception) -> str:
    # urllib wraps what went wrong, and some errors of http.client have no text.
    return str(getattr(error, "reason", error)) or type(error).__name__


def _parsed(data: bytes) -> Any:
    text = data.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
