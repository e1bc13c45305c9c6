"""Names of tensors with other prefixes than transformers writes.

``LlamaForCausalLM`` saves ``model.layers…`` and ``lm_head``. The bare ``LlamaModel`` saves
``layers…`` and no head; a model inside another one has a second ``model.``; ``torch.compile`` puts
``_orig_mod.`` before the names, ``DataParallel`` and its like ``module.``.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from checkpointing.errors import TensorMismatchError
from checkpointing.mapping.family import Family
from checkpointing.mapping.rules import LAYER, Dropped, Rule
from checkpointing.mapping.tensors import Rows, TensorMeta, TensorSource
from checkpointing.printable import printable

logger = logging.getLogger(__name__)

# No name begins with one of these words once they are taken away, so there is one way to read it.
_WRAPPERS = ("model.", "module.", "_orig_mod.")
_MULTIMODAL = re.compile(
    r"(language_model|vision_tower|vision_model|multi_modal_projector|visual|audio_tower)\."
)


@dataclass(frozen=True)
class TensorNames:
    """How the tensors of a checkpoint are called.

    Attributes:
        in_file: for each name that transformers writes, the one in the file.
        of_bare_model: the decoder was saved by itself, which then has no head.
    """

    in_file: Mapping[str, str]
    of_bare_model: bool = False

    @property
    def example(self) -> tuple[str, str] | None:
        """A name in the file and what it is read as; ``None`` if all are as they should be."""
        return next(((old, name) for name, old in self.in_file.items() if old != name), None)

    def over(self, source: TensorSource) -> TensorSource:
        """The source's tensors under the names that transformers writes."""
        return source if self.example is None else _Renamed(source, self.in_file)


class _Renamed:
    def __init__(self, source: TensorSource, in_file: Mapping[str, str]) -> None:
        self._source = source
        self._in_file = in_file
        self.metas: dict[str, TensorMeta] = {n: source.metas[old] for n, old in in_file.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._in_file[name])

    def rows(self, name: str) -> Rows:
        return self._source.rows(self._in_file[name])


def read_names(names: Iterable[str], family: Family, subject: str) -> TensorNames:
    """Recognises the prefix of a checkpoint's names, which all of them must have.

    Names that are none of the family's are left as they are, for the plan to refuse.

    Args:
        names: the names in the files.
        family: whose names they should be.
        subject: names the checkpoint in errors and in the log.

    Raises:
        TensorMismatchError: if the prefixes differ, or the tensors are a multimodal model's.
    """
    names = list(names)
    decoder, heads = _patterns(family)
    # The words come in any order and number; none of them begins what is left.
    words = [re.escape(word) for word in (*_WRAPPERS, family.hf_base) if word]
    wrappers = re.compile(rf"^(?:{'|'.join(words)})+")
    if decoder is None:
        return TensorNames({name: name for name in names})
    base: dict[str, list[str]] = {}
    head: dict[str, list[str]] = {}
    foreign: list[str] = []
    in_file: dict[str, str] = {}
    for name in names:
        rest = wrappers.sub("", name)
        prefix = name.removesuffix(rest)
        if decoder.match(rest):
            base.setdefault(prefix, []).append(name)
            in_file[family.hf_base + rest] = name
        elif heads is not None and heads.match(rest):
            head.setdefault(prefix, []).append(name)
            in_file[rest] = name
        else:
            in_file[name] = name
            if _MULTIMODAL.match(rest):
                foreign.append(name)
    if foreign:
        raise TensorMismatchError(
            subject,
            [f"{_several(foreign)}: of a multimodal model"],
            f"config.json is that of a {family.name} model, which is text only: take a text-only "
            "release of the model, or save its text model by itself, under the names that "
            f"{family.name} has.",
        )
    if len(base) > 1 or len(head) > 1 or not all(p.startswith(q) for p in base for q in head):
        raise TensorMismatchError(
            subject,
            [
                f"{_several(found)}: the prefix is {prefix!r}"
                for prefix, found in (*base.items(), *head.items())
            ],
            "All tensors of a checkpoint must have one prefix: these are of several, or some are "
            "there twice. Take out what does not belong, or save the model anew.",
        )
    of_bare_model = family.hf_base not in next(iter(base), family.hf_base)
    found = TensorNames(in_file, of_bare_model)
    if found.example is not None:
        logger.info(
            "%s: %s is read as %s, and all others likewise; saved names are as transformers "
            "writes them",
            subject,
            *map(printable, found.example),
        )
    return found


def _patterns(family: Family) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """What the decoder's names are behind the family's base, and those of what lies beside it.

    Without the first, the family's decoder lies elsewhere, and nothing is known of its prefixes.
    """
    foreign = [rule.foreign for rule in family.formats["hf"] if isinstance(rule, Rule | Dropped)]
    base = family.hf_base
    if not all(name.startswith(base) for name in foreign if LAYER in name):
        return None, None
    decoder = [name.removeprefix(base) for name in foreign if name.startswith(base)]
    return _any_of(decoder), _any_of([name for name in foreign if not name.startswith(base)])


def _any_of(modules: Sequence[str]) -> re.Pattern[str] | None:
    numbered = [re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(module)) for module in modules]
    return re.compile(rf"(?:{'|'.join(numbered)})(?:\.|$)") if numbered else None


def _several(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"{names[0]}{f' and {more} more' if more else ''}"
