"""The model card of what is uploaded: what it is, what it was made from, how to load it."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from checkpointing.errors import ConfigError
from checkpointing.push import Upload

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

# Cards with this line are written anew; one from which it was removed is its owner's.
MADE_HERE = "<!-- Written by `tune push`. Remove this line to keep your changes to this text. -->"
_VERSIONS_OF = ("tunepoint", "torch", "huggingface_hub")


@dataclass(frozen=True)
class _Task:
    """How a kind of model is loaded.

    Attributes:
        ending: of PEFT's name of the task, or of the class of transformers.
        auto_class: of transformers.
        pipeline: the Hub's name of the task.
    """

    ending: str
    auto_class: str
    pipeline: str


_TASKS = (
    _Task("CAUSAL_LM", "AutoModelForCausalLM", "text-generation"),
    _Task("ForCausalLM", "AutoModelForCausalLM", "text-generation"),
    _Task("SEQ_CLS", "AutoModelForSequenceClassification", "text-classification"),
    _Task("ForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
    _Task("ForConditionalGeneration", "AutoModelForImageTextToText", "image-text-to-text"),
)


def card_text(
    upload: Upload,
    repo_id: str,
    revision: str | None = None,
    recipe: str | None = None,
    config: str | None = None,
    existing: str | None = None,
) -> str:
    """The content of README.md.

    Args:
        upload: what is uploaded.
        repo_id: where to.
        revision: branch, if it is not the default one.
        recipe: name of the recipe that trained it.
        config: name of the recipe's config.
        existing: a card that is kept; it gets the metadata that it lacks.

    Raises:
        ConfigError: if the metadata of the existing card cannot be read.
    """
    from huggingface_hub import ModelCard

    data = _metadata(upload)
    if existing is not None:
        return str(_with_metadata(existing, data))
    body = [MADE_HERE, f"# {repo_id.rpartition('/')[2]}", _what_it_is(upload)]
    body += ["## Training", _list(_training(upload, recipe, config))]
    body += ["## Use", f"```python\n{_code(upload, repo_id, revision)}\n```"]
    body += ["## Versions", _list(_versions())]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(body) + "\n"))


def is_made_here(card: str) -> bool:
    """Whether nobody has claimed the text of a card, so that it may be written anew."""
    return MADE_HERE in card


def _metadata(upload: Upload) -> "ModelCardData":
    from huggingface_hub import ModelCardData

    task = _task_of(upload)
    tags = ["tunepoint"]
    if upload.adapter is not None:
        tags.append("dora" if "DoRA" in upload.adapter.kind else "lora")
    return ModelCardData(
        base_model=upload.base_model,
        library_name="peft" if upload.is_adapter else "transformers",
        pipeline_tag=None if task is None else task.pipeline,
        tags=tags,
    )


def _with_metadata(existing: str, data: "ModelCardData") -> "ModelCard":
    """A card with the metadata that it lacks; what its owner has written stays."""
    import yaml
    from huggingface_hub import ModelCard

    if not re.match(r"\s*---[\r\n]", existing):
        existing = f"---\n{{}}\n---\n{existing}"
    try:
        card = ModelCard(existing)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"README.md: its metadata, between the lines ---, cannot be read: {error}; correct it"
        ) from error
    tags = card.data.get("tags") or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    for key, value in data.to_dict().items():
        if card.data.get(key) is None:
            card.data[key] = value
    card.data["tags"] = tags + [tag for tag in data.tags or [] if tag not in tags]
    return card


def _task_of(upload: Upload) -> _Task | None:
    return next((task for task in _TASKS if upload.task.endswith(task.ending)), None)


def _base_text(upload: Upload) -> str:
    if upload.base_model is not None:
        return f"[{upload.base_model}](https://huggingface.co/{upload.base_model})"
    return upload.base_name or "a model that is not named"


def _what_it_is(upload: Upload) -> str:
    base = _base_text(upload)
    if upload.adapter is None:
        return f"A model that was made from {base}." if upload.base_name else "A model."
    kind = upload.adapter.kind
    if upload.is_adapter:
        return f"A {kind} adapter for {base}, in PEFT's form."
    return f"The model {base} with a {kind} adapter merged into its weights."


def _training(upload: Upload, recipe: str | None, config: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"Base model": _base_text(upload) if upload.base_name else None}
    adapter = upload.adapter
    if adapter is not None:
        facts |= {
            "Adapter": f"{adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha:g}",
            "Adapted modules": ", ".join(f"`{name}`" for name in adapter.targets),
            "Trained whole": ", ".join(f"`{name}`" for name in adapter.trained_whole),
        }
        if adapter.base_dtype is not None:
            facts["Base in training"] = (
                f"rounded to NF4 from {adapter.base_dtype} (QLoRA); the adapter fits it best so"
                if upload.is_adapter
                else f"rounded to NF4 from {adapter.base_dtype} (QLoRA), and so merged"
            )
    return facts | {
        "Recipe": recipe and f"`{recipe}`",
        "Recipe config": config and f"`{config}`",
        "Optimizer steps": upload.step,
        "Epoch": None if upload.epoch is None else upload.epoch + 1,
    }


def _code(upload: Upload, repo_id: str, revision: str | None) -> str:
    task = _task_of(upload)
    auto_class = task.auto_class if task else upload.task or "AutoModel"
    where = f'"{repo_id}"' + (f', revision="{revision}"' if revision else "")
    has_tokenizer = "tokenizer_config.json" in upload.files
    names = ", ".join(sorted([auto_class, *(["AutoTokenizer"] if has_tokenizer else [])]))
    lines = [f"from transformers import {names}", ""]
    if upload.is_adapter:
        base = upload.base_model or f"path/to/{upload.base_name or 'the-base'}"
        lines.insert(0, "from peft import PeftModel")
        lines.append(f'base = {auto_class}.from_pretrained("{base}")')
        lines.append(f"model = PeftModel.from_pretrained(base, {where})")
    else:
        lines.append(f"model = {auto_class}.from_pretrained({where})")
    if has_tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({where})")
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONS_OF:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _list(facts: dict[str, Any]) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in facts.items() if value not in (None, ""))
