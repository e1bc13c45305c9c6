"""A server on the loopback interface that speaks as much of the Hub as a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "5" * 40


@dataclass
class Hub:
    """What the server has and has seen.

    Attributes:
        repositories: files by path, by repository.
        tokens: tokens that may read gated repositories.
        gated: repositories that need one.
        fetched: paths of the files whose content was asked for.
    """

    repositories: dict[str, dict[str, bytes]]
    tokens: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves until the block ends; ``hub.url`` is for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            repo = next((name for name in hub.repositories if f"{name}/" in f"{path}/"), None)
            if repo is None:
                # The Hub says 401 to those who are not logged in, so as not to tell what exists.
                known = self.headers.get("Authorization") is not None
                self._send(404 if known else 401, error="RepoNotFound")
                return
            files = hub.repositories[repo]
            if path.startswith(f"api/models/{repo}/tree/"):
                self._send_json([_tree_entry(name, content) for name, content in files.items()])
            elif path.startswith(f"api/models/{repo}"):
                siblings = [{"rfilename": name} for name in files]
                self._send_json({"id": repo, "sha": REVISION, "siblings": siblings})
            else:
                self._send_file(repo, path.removeprefix(f"{repo}/resolve/{REVISION}/"))

        def _send_file(self, repo: str, name: str) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if repo in hub.gated and token not in hub.tokens:
                self._send(403, error="GatedRepo")
                return
            if self.command == "GET":
                hub.fetched.append(name)
            content = hub.repositories[repo][name]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._send(200, content, {"ETag": etag, "X-Repo-Commit": REVISION})

        def _send_json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send(
            self,
            status: int,
            body: bytes = b"",
            headers: dict[str, str] | None = None,
            error: str | None = None,
        ) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            if error is not None:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tree_entry(name: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": digest}
