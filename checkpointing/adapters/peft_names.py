"""Which module a key of a PEFT adapter's file belongs to, whatever it is wrapped in.

Key names as PEFT and the trainers built on it write them (https://github.com/huggingface/peft,
``docs/source/developer_guides/checkpoint.md``).
"""

import re
from dataclasses import dataclass

from checkpointing.mapping.layout import Layout, ModulePair
from checkpointing.mapping.rules import EMBEDDING_ADAPTER, Parameter

_WRAPPERS = re.compile(r"^(?:(?:base_model|model|module|_orig_mod)\.)+")
# The adapter's name stands between the parameter and `weight` where a trainer saved its own state.
_ADAPTER_KEY = re.compile(
    r"(?P<module>.+)\.(?:(?P<matrix>lora_[AB])(?:\.[^.]+)?\.(?P<last>weight|bias)"
    r"|(?P<table>lora_embedding_[AB])(?:\.(?!weight$)[^.]+)?(?:\.weight)?"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.(?!weight$)[^.]+)?(?:\.weight)?)"
)
_BASE_KEY = re.compile(
    r"(?P<module>.+?)(?:(?P<copy>\.base_layer|\.original_module)|\.modules_to_save(?:\.[^.]+)?)?"
    r"\.(?P<last>weight|bias)"
)
_UNTIE = (
    "PEFT trains one of them apart from the other; start from an untied base, with a head of its "
    "own and tie_word_embeddings false"
)

Place = tuple[str, int]
"""A native tensor and the number of an expert in it."""


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of the file that belongs to a module's adapter.

    Attributes:
        key: its name in the file.
        module_key: the part of it that names the module.
        pair: the native module, or one of those that the foreign module is fused of.
        parameter: which of its adapter's tensors it is.
    """

    key: str
    module_key: str
    pair: ModulePair
    parameter: Parameter

    @property
    def native(self) -> str:
        """Its native name."""
        return self.parameter.native_name(self.pair.native)

    @property
    def place(self) -> Place:
        """The native tensor that it is, or the expert's slice of it."""
        return self.native, self.pair.expert or 0

    @property
    def names(self) -> tuple[str, ...]:
        """What a pattern may be written for: the name in the file, or that in the plain model."""
        return self.module_key.removeprefix("base_model.model."), self.pair.foreign


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of the file that the base has too: a copy of its own, or one that was trained.

    Attributes:
        key: its name in the file.
        module: foreign name of the module.
        parts: the native modules and their tensors in it; more than one if it is fused.
        is_copy: the key says that this is the base's own.
        is_tied_head: the module is the output projection of a tied model, and the part is the
            embedding.
    """

    key: str
    module: str
    parts: tuple[tuple[ModulePair, Parameter], ...]
    is_copy: bool
    is_tied_head: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it must have."""
        pair, parameter = self.parts[0]
        return pair.foreign_shape(parameter)

    @property
    def name(self) -> str:
        """Foreign name of the tensor."""
        return self.parts[0][1].foreign_name(self.module)


class PeftNames:
    """Finds the module that a key of the file belongs to.

    Args:
        layout: the base's layout in the Hugging Face format.
    """

    def __init__(self, layout: Layout) -> None:
        self._dims = layout.dims
        self._pairs: dict[str, list[ModulePair]] = {}
        for pair in layout.pairs:
            # Checkpoints of old models may name modules otherwise than transformers does.
            for name in {pair.foreign, layout.family.name_in_transformers(pair.foreign)}:
                self._pairs.setdefault(_WRAPPERS.sub("", name), []).append(pair)
        self._tied = {
            _WRAPPERS.sub("", foreign.removesuffix(".weight")): (foreign, pair)
            for foreign, pair, _ in layout.copies()
        }

    def find(self, key: str) -> list[AdapterTensor] | str | None:
        """An adapter's tensor for each native module that it is for.

        What is wrong with it, if anything is; ``None`` if it is no tensor of an adapter.
        """
        match = _ADAPTER_KEY.fullmatch(key)
        if match is None:
            return f"{key}: not a tensor of a LoRA or DoRA adapter" if ".lora_" in key else None
        core = _WRAPPERS.sub("", match["module"])
        if core in self._tied:
            return f"{key}: the base's {core} is its embedding, and {_UNTIE}"
        matrix = match["matrix"] and f"{match['matrix']}.{match['last']}"
        foreign = matrix or match["table"] or match["magnitude"]
        what = "embedding" if match["table"] else "linear module"
        found = []
        for pair in self._pairs.get(core, []):
            kind = pair.module.adapter
            if kind is None or (
                (match["table"] or matrix) and (bool(match["table"]) != (kind is EMBEDDING_ADAPTER))
            ):
                continue
            if kind is EMBEDDING_ADAPTER and self._tied:
                return f"{key}: the base's output projection is its {core}, and {_UNTIE}"
            parameter = next((p for p in kind.parameters if p.foreign == foreign), None)
            if parameter is None:
                return f"{key}: {foreign} on such a module is not trained natively"
            found.append(AdapterTensor(key, match["module"], pair, parameter))
        return found or f"{key}: the base has no such {what}"

    def find_base(self, key: str) -> BaseTensor | None:
        """The tensor of the base that a key holds a copy of, or that was trained from it."""
        match = _BASE_KEY.fullmatch(key)
        if match is None:
            return None
        core = _WRAPPERS.sub("", match["module"])
        pairs = list(self._pairs.get(core, []))
        is_tied_head = core in self._tied
        module = pairs[0].foreign if pairs else match["module"]
        if is_tied_head:
            foreign, embedding = self._tied[core]
            module, pairs = foreign.removesuffix(".weight"), [embedding]
        parts = tuple(
            (pair, parameter)
            for pair in pairs
            for parameter in pair.module.parameters_for(self._dims)
            if parameter.foreign == match["last"]
        )
        if not parts:
            return None
        return BaseTensor(key, module, parts, match["copy"] is not None, is_tied_head)
