"""Upload an adapter or a model to the Hugging Face Hub, with a model card.

Of an adapter run's checkpoint this is the PEFT adapter, or with --merged the merged model; else
the model. Recipe state, native adapter, logs and hidden files stay here, and so do paths of this
machine. Nothing shows on the Hub before all of it is there. A README.md in the directory, or on the
Hub, is kept; it gets the metadata that it lacks.

examples:
  tune push out/smollm2_135M_lora/epoch_0 OWNER/my-adapter --dry-run
  tune push out/smollm2_135M_lora/epoch_0 OWNER/my-model --merged --private
"""

import argparse
import sys

from checkpointing.cli.errors import UsageError
from checkpointing.cli.push_hub import Destination, send
from checkpointing.cli.text import count_text, size_text, table
from checkpointing.storage.location import path_or_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune push`."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT_DIR", type=path_or_url, help="such as epoch_0 of a run"
    )
    parser.add_argument(
        "repo_id", metavar="REPO_ID", help="owner/name on the Hub; it is made if need be"
    )
    parser.add_argument(
        "--merged", action="store_true", help="the merged model rather than the adapter"
    )
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument(
        "--revision",
        metavar="BRANCH",
        help="branch to upload to, made if need be; main if left out",
    )
    parser.add_argument("--create-pr", action="store_true", help="open a pull request")
    parser.add_argument("--message", metavar="TEXT", help="first line of the commit")
    parser.add_argument(
        "--base-model",
        metavar="REPO_ID",
        help="the base's repository, where the checkpoint cannot tell it",
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG",
        help="the recipe's config, which the model card names; that of the run if left out",
    )
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help="access token that may write; HF_TOKEN or the stored login if left out",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be uploaded, and upload nothing"
    )


def execute(args: argparse.Namespace) -> int:
    """Shows what is uploaded, uploads it, and prints where it lies."""
    _check_arguments(args)
    from checkpointing.model_card import card_text
    from checkpointing.push import CARD_NAME, check_content, plan_upload

    named = None if args.config is None else _recipe_and_config(args.config)
    upload = plan_upload(args.checkpoint, args.merged, args.base_model)
    recipe, config = named or (upload.recipe, upload.config)
    own_card = None if upload.card is None else upload.card.read_text(encoding="utf-8-sig")

    def card(existing: str | None) -> str:
        revision = None if args.create_pr else args.revision
        return card_text(upload, args.repo_id, revision, recipe, config, own_card or existing)

    text = card(None)
    print(f"{args.checkpoint}, {upload.summary}, to {args.repo_id}")
    sizes = upload.sizes | {CARD_NAME: len(text.encode())}
    print(table([(name, size_text(size)) for name, size in sorted(sizes.items())]))
    print(f"{count_text(len(sizes), 'file')}, {size_text(sum(sizes.values()))}")
    if upload.left_out:
        print(f"left out: {', '.join(upload.left_out)}")
    for note in upload.notes:
        print(f"warning: {note}", file=sys.stderr)
    if args.dry_run:
        print(f"\n{CARD_NAME}:\n{text}\nnothing was uploaded (--dry-run)")
        return 0
    check_content(upload)
    commit = send(
        upload,
        card,
        Destination(
            repo_id=args.repo_id,
            token=args.token,
            private=args.private,
            revision=args.revision,
            create_pr=args.create_pr,
            message=args.message or f"Upload {upload.summary}",
        ),
    )
    print(f"uploaded: {commit.pr_url if args.create_pr else commit.commit_url}")
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        for repo_id in filter(None, (args.repo_id, args.base_model)):
            validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"{repo_id!r} is not a repository's name, owner/name: {error}") from error
    if "/" not in args.repo_id:
        raise UsageError(f"{args.repo_id!r}: say whose it is, as in owner/{args.repo_id}")
    if args.create_pr and (args.revision or args.private):
        raise UsageError(
            "--create-pr asks to change the main branch of a repository that is there; leave out "
            "--revision and --private"
        )


def _recipe_and_config(name: str) -> tuple[str | None, str]:
    """Names of the recipe and the config, without the directories of this machine."""
    from checkpointing.cli.catalog import find_config, recipe_of

    config = find_config(name)
    recipe = recipe_of(config.name)
    return None if recipe is None else recipe.name, config.name
