"""Sending a planned upload to the Hub, as one commit, and what its errors mean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointing.cli.errors import UploadError, UsageError
from checkpointing.errors import CheckpointingError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import ModelInfo

    from checkpointing.push import Upload


@dataclass(frozen=True)
class Destination:
    """Where an upload goes.

    Attributes:
        repo_id: owner and name.
        token: access token; ``None`` for the one of the environment or the stored login.
        private: the repository must be private.
        revision: branch; ``None`` for the default one.
        create_pr: open a pull request instead of writing to the branch.
        message: first line of the commit.
    """

    repo_id: str
    token: str | None
    private: bool
    revision: str | None
    create_pr: bool
    message: str


def send(
    upload: "Upload", card: Callable[[str | None], str], destination: Destination
) -> "CommitInfo":
    """Uploads all files and then commits them at once, if nobody else has committed meanwhile.

    Weight files that the repository has and the upload lacks, and that would be loaded in its
    place, are deleted in the same commit.

    Args:
        upload: from :func:`checkpointing.push.plan_upload`.
        card: gives the content of README.md; takes that of the repository, if it is its owner's.
        destination: where to; the repository and the branch are made if need be.

    Raises:
        UsageError: if the repository must be private and is not.
        UploadError: if the Hub refuses, cannot be reached, or a file cannot be read.
        ConfigError: if the repository holds what would be loaded together with the upload.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from checkpointing.push import CARD_NAME, replaced_files

    api = HfApi(token=destination.token)
    with _clear_errors(destination.repo_id, api.endpoint):
        info = _prepare(api, destination)
        names = [each.rfilename for each in info.siblings or []]
        stale = replaced_files(names, upload)
        for name in stale:
            print(f"deletes {name}, which would be loaded in place of what is uploaded")
        text = card(_card_of(api, info) if CARD_NAME in names else None)
        commit: CommitInfo = api.create_commit(
            destination.repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in upload.files.items()),
                CommitOperationAdd(CARD_NAME, text.encode()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=destination.message,
            revision=destination.revision,
            create_pr=destination.create_pr,
            parent_commit=info.sha,
        )
    return commit


def _prepare(api: "HfApi", destination: Destination) -> "ModelInfo":
    """Makes the repository and the branch; returns what it holds already."""
    repo_id, branch = destination.repo_id, destination.revision
    if destination.create_pr:
        return api.model_info(repo_id)
    api.create_repo(repo_id, private=destination.private or None, exist_ok=True)
    info = api.model_info(repo_id)
    if destination.private and not info.private:
        raise UsageError(
            f"{repo_id} exists and is public, so --private cannot be kept; make it private at "
            f"{api.endpoint}/{repo_id}/settings, or give another name; nothing was uploaded"
        )
    if branch is None:
        return info
    api.create_branch(repo_id, branch=branch, exist_ok=True)
    return api.model_info(repo_id, revision=branch)


def _card_of(api: "HfApi", info: "ModelInfo") -> str | None:
    """The repository's README.md, unless it was written by this command and may be replaced."""
    from checkpointing.model_card import is_made_here
    from checkpointing.push import CARD_NAME

    path = api.hf_hub_download(info.id, CARD_NAME, revision=info.sha)
    text = Path(path).read_text(encoding="utf-8-sig")
    return None if is_made_here(text) else text


@contextmanager
def _clear_errors(repo_id: str, hub: str) -> Iterator[None]:
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except CheckpointingError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise UploadError(_meaning(repo_id, hub, error)) from error


_AGAIN = "run the command again: what has arrived is not sent twice"


def _meaning(repo_id: str, hub: str, error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    # Threads that upload wrap what has happened to them.
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if isinstance(error, HfHubHTTPError):
        return f"{repo_id}: {_refusal(hub, error)}; nothing was committed"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; nothing was committed"
    if isinstance(error, PermissionError):
        return f"{repo_id}: the Hub's storage refuses access: {first}; nothing was committed"
    if isinstance(error, (HTTPError, OSError)):
        return (
            f"cannot reach {hub}, or the connection broke: {first}; check the network and {_AGAIN}"
        )
    return f"{repo_id}: {first}; {_AGAIN}"


def _refusal(hub: str, error: "HfHubHTTPError") -> str:
    status = error.response.status_code
    meanings = {
        401: "the Hub refuses access (401): there is no login, or the token is not valid; run "
        f"`hf auth login`, or give --token one that may write, from {hub}/settings/tokens",
        403: "the token may not write there (403); check the owner's name and give --token one "
        "with write access to it, or offer the files with --create-pr",
        404: "the Hub has no such repository or branch, or does not show it to this token (404); "
        "check the name, and run `hf auth login` or give --token",
        412: f"somebody else has committed to it meanwhile (412); {_AGAIN}",
    }
    said = error.server_message or str(error).strip()
    return meanings.get(status, f"the Hub answered with an error ({status}): {said}")
