"""A server on the loopback interface that speaks as much of the Hub as an upload needs.

The endpoints as huggingface_hub calls them, and Git LFS's batch API with the basic transfer
(https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md).
"""

import base64
import hashlib
import json
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import yaml

LARGE = (".safetensors", ".bin", ".pt", ".model")


@dataclass
class Repository:
    """A repository: files by path, by branch.

    Attributes:
        private: it is.
        branches: what is committed.
        commits: by branch, the messages of all commits.
        pull_requests: files by path, of each.
    """

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: dict[str, list[str]] = field(default_factory=lambda: {"main": ["initial commit"]})
    pull_requests: list[dict[str, bytes]] = field(default_factory=list)

    def sha(self, branch: str) -> str:
        """The commit that a branch is at."""
        history = [branch, *self.commits[branch]]
        return hashlib.sha1("\n".join(history).encode()).hexdigest()

    def branch_of(self, revision: str) -> str | None:
        """The branch of a name or a commit."""
        names = (n for n in self.branches if revision in (n, self.sha(n)))
        return next(names, None)


@dataclass
class PushHub:
    """What the server has and has seen.

    Attributes:
        repositories: by name.
        writers: owner that each token may write for.
        stored: large files by their SHA-256, uploaded though perhaps never committed.
        uploads: how often each large file has come, whole or not.
        break_uploads: how many of the next uploads break in the middle of the body.
        break_commits: how many of the next commits get no answer, and are not made.
        refuse_uploads: answer uploads with this status.
        others_commit: somebody else commits while files are uploaded.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    uploads: Counter[str] = field(default_factory=Counter)
    break_uploads: int = 0
    break_commits: int = 0
    refuse_uploads: int | None = None
    others_commit: bool = False
    url: str = ""


@contextmanager
def serving(hub: PushHub) -> Iterator[PushHub]:
    """Serves until the block ends; ``hub.url`` is for HF_ENDPOINT."""

    class Handler(_Handler):
        served = hub

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


class _Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    served: PushHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        try:
            self._route(parts, query)
        except _Refused as refused:
            headers = {"X-Error-Message": str(refused)} | (
                {"X-Error-Code": refused.code} if refused.code else {}
            )
            self._send(refused.status, {"error": str(refused)}, headers)

    def _route(self, parts: list[str], query: str) -> None:
        match parts:
            case ["api", "repos", "create"]:
                self._create(self._json())
            case ["api", "validate-yaml"]:
                self._validate(self._json()["content"])
            case ["api", "models", owner, name]:
                self._info(f"{owner}/{name}", "main")
            case ["api", "models", owner, name, "revision", revision]:
                self._info(f"{owner}/{name}", revision)
            case ["api", "models", owner, name, "branch", branch]:
                self._make_branch(f"{owner}/{name}", branch)
            case ["api", "models", owner, name, "preupload", revision]:
                self._preupload(f"{owner}/{name}", revision, self._json()["files"])
            case ["api", "models", owner, name, "commit", revision]:
                self._commit(f"{owner}/{name}", revision, "create_pr=1" in query)
            case [owner, repo, "info", "lfs", "objects", "batch"]:
                self._batch(f"{owner}/{repo.removesuffix('.git')}", self._json()["objects"])
            case ["lfs", oid]:
                self._store(oid)
            case [owner, name, "resolve", revision, *rest]:
                self._file(f"{owner}/{name}", revision, "/".join(rest))
            case _:
                raise _Refused(404, f"no such endpoint: {self.path}")

    def _create(self, asked: dict[str, Any]) -> None:
        owner = self._user()
        repo_id = f"{asked['organization']}/{asked['name']}"
        if repo_id in self.served.repositories and self._may_write(repo_id):
            self._send(409, {"error": "exists", "url": f"{self.served.url}/{repo_id}"})
            return
        if asked["organization"] != owner:
            raise _Refused(403, f"You don't have the rights to create a model under {repo_id}")
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.served.repositories[repo_id] = Repository(private)
        self._send(200, {"url": f"{self.served.url}/{repo_id}", "id": repo_id})

    def _validate(self, content: str) -> None:
        _, block, _ = content.split("---\n", 2)
        assert isinstance(yaml.safe_load(block), dict)
        self._send(200, {"errors": [], "warnings": []})

    def _info(self, repo_id: str, revision: str) -> None:
        repository = self._repository(repo_id)
        branch = self._branch(repository, revision)
        siblings = [{"rfilename": name} for name in repository.branches[branch]]
        facts = {"id": repo_id, "sha": repository.sha(branch), "private": repository.private}
        self._send(200, {**facts, "siblings": siblings})

    def _make_branch(self, repo_id: str, branch: str) -> None:
        repository = self._repository(repo_id, to_write=True)
        if branch in repository.branches:
            raise _Refused(409, "Reference already exists")
        repository.branches[branch] = dict(repository.branches["main"])
        repository.commits[branch] = list(repository.commits["main"])
        self._send(200, {})

    def _preupload(self, repo_id: str, revision: str, files: list[dict[str, Any]]) -> None:
        repository = self._repository(repo_id)
        branch = self._branch(repository, revision)
        there = repository.branches[branch]
        if self.served.others_commit:
            repository.commits[branch].append("of somebody else")
        answers = []
        for name in (each["path"] for each in files):
            large = name.endswith(LARGE)
            answer = {"path": name, "uploadMode": "lfs" if large else "regular"}
            if name in there:
                answer["oid"] = _oid(there[name], large)
            answers.append({**answer, "shouldIgnore": False})
        self._send(200, {"files": answers})

    def _batch(self, repo_id: str, objects: list[dict[str, Any]]) -> None:
        self._repository(repo_id)
        answers = []
        for each in objects:
            upload = {"upload": {"href": f"{self.served.url}/lfs/{each['oid']}"}}
            there = each["oid"] in self.served.stored
            answers.append(each | ({} if there else {"actions": upload}))
        self._send(200, {"transfer": "basic", "objects": answers})

    def _store(self, oid: str) -> None:
        self.served.uploads[oid] += 1
        if self.served.break_uploads > 0:
            self.served.break_uploads -= 1
            self.rfile.read(1000)
            self._break()
            return
        content = self._body()
        if self.served.refuse_uploads is not None:
            raise _Refused(self.served.refuse_uploads, "the upload has expired")
        if hashlib.sha256(content).hexdigest() != oid:
            raise _Refused(400, "another checksum")
        self.served.stored[oid] = content
        self._send(200, {})

    def _commit(self, repo_id: str, revision: str, as_pull_request: bool) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        repository = self._repository(repo_id, to_write=not as_pull_request)
        branch = self._branch(repository, revision)
        if self.served.break_commits > 0:
            self.served.break_commits -= 1
            self._break()
            return
        files = dict(repository.branches[branch])
        message = ""
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    message = value["summary"]
                    head = repository.sha(branch)
                    if value.get("parentCommit", head) != head:
                        raise _Refused(412, "A commit has happened since")
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.served.stored[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case other:
                    raise _Refused(400, f"{other} is not known")
        url = f"{self.served.url}/{repo_id}"
        if as_pull_request:
            repository.pull_requests.append(files)
        else:
            repository.branches[branch] = files
            repository.commits[branch].append(message)
        oid = repository.sha(branch)
        number = len(repository.pull_requests)
        self._send(
            200,
            {
                "commitUrl": f"{url}/commit/{oid}",
                "commitOid": oid,
                "pullRequestUrl": f"{url}/discussions/{number}",
            },
        )

    def _file(self, repo_id: str, revision: str, name: str) -> None:
        repository = self._repository(repo_id)
        branch = self._branch(repository, revision)
        content = repository.branches[branch].get(name)
        if content is None:
            raise _Refused(404, "no such file", "EntryNotFound")
        etag = f'"{_oid(content, name.endswith(LARGE))}"'
        self._send(200, content, {"ETag": etag, "X-Repo-Commit": repository.sha(branch)})

    def _user(self) -> str:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.served.writers:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return self.served.writers[token]

    def _may_write(self, repo_id: str) -> bool:
        return self._user() == repo_id.partition("/")[0]

    def _repository(self, repo_id: str, to_write: bool = False) -> Repository:
        found = self.served.repositories.get(repo_id)
        if found is None or (found.private and not self._may_write(repo_id)):
            raise _Refused(404, "Repository not found", "RepoNotFound")
        if to_write and not self._may_write(repo_id):
            raise _Refused(403, "You don't have the rights to write to it")
        return found

    def _branch(self, repository: Repository, revision: str) -> str:
        branch = repository.branch_of(revision)
        if branch is None:
            raise _Refused(404, "no such revision", "RevisionNotFound")
        return branch

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(chunks)

    def _json(self) -> Any:
        return json.loads(self._body())

    def _break(self) -> None:
        self.close_connection = True
        # Without lingering the peer gets a reset, as from a network that fails.
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        os.close(self.connection.detach())

    def _send(
        self, status: int, content: bytes | object, headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(content: bytes, large: bool) -> str:
    """Git's name of a small file, and LFS's of a large one."""
    if large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
