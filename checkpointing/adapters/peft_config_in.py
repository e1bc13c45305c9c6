"""Reading PEFT's ``adapter_config.json``: what it says, and what cannot be carried on natively.

Fields, their defaults and the matching of patterns are those of PEFT's ``LoraConfig``
(https://github.com/huggingface/peft, ``src/peft/tuners/lora/config.py``).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from checkpointing.adapters.pattern import pattern
from checkpointing.errors import ConfigError

_MERGE = "merge it with PEFT's merge_and_unload and start from the merged model"

# Fields that, when set, mean numbers which A, B and a magnitude alone do not give.
_REFUSED = {
    "bias": f"biases of the base were trained with the adapter; {_MERGE}",
    "trainable_token_indices": f"rows of the embedding were trained too; {_MERGE}",
    "fan_in_fan_out": "the base's weights are taken to be (in, out), as in Conv1D layers; "
    "set it to false if they are those of linear layers",
    "layer_replication": "layers of the base are repeated; start from a base saved that way",
    "use_qalora": "QA-LoRA pools the inputs of A; train the adapter without it",
    "use_bdlora": "BD-LoRA's matrices are block-diagonal; train the adapter without it",
    "alora_invocation_tokens": "aLoRA acts after these tokens only; train the adapter without it",
    "arrow_config": "Arrow routes between adapters; start from one of them",
    "kasa_config": f"KaSA changes the base and has a diagonal between A and B; {_MERGE}",
    "monteclora_config": f"MonteCLoRA samples around the adapter; {_MERGE}",
}
_SETTINGS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "lora_bias",
    "ensure_weight_tying",
)
# Fields that change nothing in what the tensors compute: provenance, how the adapter was started,
# how gradients were computed, where it was run.
WITHOUT_EFFECT = (
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "qalora_group_size",
    "runtime_config",
    "megatron_config",
    "megatron_core",
)
# Every one is compared with every module. Far more than modules of a model that has one adapter for
# each expert of a layer; a pattern takes longer to compare than a name.
_MOST_ENTRIES = {
    "rank_pattern": 2000,
    "alpha_pattern": 2000,
    "target_modules": 20_000,
    "target_parameters": 20_000,
    "exclude_modules": 20_000,
    "modules_to_save": 20_000,
    "layers_to_transform": 20_000,
}
# The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract the adapter's start from the base, and
# MiCA holds B fixed.
_PLAIN_STARTS = (True, False, None, "true", "false", "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftSettings:
    """What ``adapter_config.json`` says of a LoRA or DoRA adapter.

    Attributes:
        r: rank of the modules that no pattern matches.
        alpha: alpha of the modules that no pattern matches.
        dropout: probability of dropping an input element of ``A`` in training.
        use_dora: whether there are magnitudes; ``None`` if the config does not say.
        use_rslora: scale by ``alpha / sqrt(r)``.
        rank_pattern: ranks by regular expression.
        alpha_pattern: alphas by regular expression.
        target_modules: last names or full names, one regular expression, or ``"all-linear"``.
        target_parameters: last names or full names of adapted parameters.
        exclude_modules: names, or one regular expression; empty for none.
        layers: numbers of the layers that carry an adapter; ``None`` for all.
        modules_to_save: ends of the names of modules that were trained whole.
        lora_bias: whether B has a bias; ``None`` if the config does not say.
        ensure_weight_tying: the output projection of a tied model follows its trained embedding.
        subject: names the file in errors.
    """

    r: int
    alpha: float
    dropout: float
    use_dora: bool | None
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str
    target_parameters: tuple[str, ...]
    exclude_modules: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    modules_to_save: tuple[str, ...]
    lora_bias: bool | None
    ensure_weight_tying: bool
    subject: str

    def names_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """What patterns may be written for: a module's names, or those of its adapted weight."""
        weights = [f"{name}.weight" for name in names]
        return (
            *names,
            *(weight for weight in weights if self._names(self.target_parameters, weight)),
        )

    def rank_of(self, names: Sequence[str]) -> int:
        """Rank of a module that goes by these names."""
        return int(self._by_pattern(self.rank_pattern, names, self.r))

    def alpha_of(self, names: Sequence[str]) -> float:
        """Alpha of a module that goes by these names."""
        return float(self._by_pattern(self.alpha_pattern, names, self.alpha))

    def saves(self, name: str) -> bool:
        """Whether PEFT trains a module whole: its full name ends with one that is given."""
        return any(name.endswith(end) for end in self.modules_to_save)

    def targets(self, name: str, is_head: bool) -> bool:
        """Whether PEFT would put an adapter on a linear module.

        Args:
            name: full name of the module in transformers.
            is_head: it is the output projection or the embedding, which ``"all-linear"`` leaves
                out.
        """
        if self._names(self.exclude_modules, name) or self.saves(name):
            return False
        if self.target_modules == "all-linear":
            return not is_head
        layer = re.match(r".*?\.(\d+)\.", name)
        if self.layers is not None and not (layer and int(layer[1]) in self.layers):
            return False
        return self._names(self.target_modules, name)

    def _by_pattern(
        self, patterns: Mapping[str, float], names: Sequence[str], default: float
    ) -> float:
        """The value of the first pattern that matches, as PEFT matches."""
        for expression, value in patterns.items():
            with self._saying_where():
                if any(pattern(_at_the_end(expression)).matches_start(name) for name in names):
                    return value
        return default

    def _names(self, targets: tuple[str, ...] | str, name: str) -> bool:
        if isinstance(targets, str):
            with self._saying_where():
                return pattern(targets).matches_all(name)
        return any(name == target or name.endswith(f".{target}") for target in targets)

    @contextmanager
    def _saying_where(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.subject}: {error}") from error


def _at_the_end(expression: str) -> str:
    """PEFT's expression for a name that ends in what an expression says."""
    return rf"(.*\.)?({expression})$"


def parse_peft_config(config: Mapping[str, Any], subject: str) -> PeftSettings:
    """Reads the content of ``adapter_config.json``; fields left out take PEFT's defaults.

    Args:
        config: the file's content.
        subject: names the file in errors.

    Raises:
        ConfigError: lists every field that native training cannot carry on, or that is wrong.
    """
    method = config.get("peft_type")
    if method != "LORA":
        raise ConfigError(
            f"{subject}: peft_type is {method!r}, and only 'LORA' (with DoRA and rsLoRA) is "
            f"trained natively; {_MERGE}"
        )
    problems = [
        f"{name}={config[name]!r}: {reason}"
        for name, reason in _REFUSED.items()
        if config.get(name) and not (name == "bias" and config[name] == "none")
    ]
    problems += _start_problems(config.get("init_lora_weights"))
    known = {*_REFUSED, *_SETTINGS, *WITHOUT_EFFECT}
    problems += [
        f"{name}={value!r}: not known here, and it may change what the tensors mean; remove it "
        "from the file if it does not"
        for name, value in config.items()
        if value and name not in known
    ]
    problems += _too_many(config) or _wrong_values(config)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"{subject}: cannot be the start of native training\n{lines}")
    use_dora, lora_bias = config.get("use_dora"), config.get("lora_bias")
    return PeftSettings(
        r=config.get("r", 8),
        alpha=float(config.get("lora_alpha", 8)),
        dropout=float(config.get("lora_dropout") or 0),
        use_dora=None if use_dora is None else bool(use_dora),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
        target_modules=_names_or_pattern(config.get("target_modules")),
        target_parameters=tuple(config.get("target_parameters") or ()),
        exclude_modules=_names_or_pattern(config.get("exclude_modules")),
        layers=_layers(config.get("layers_to_transform")),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        lora_bias=None if lora_bias is None else bool(lora_bias),
        ensure_weight_tying=bool(config.get("ensure_weight_tying")),
        subject=subject,
    )


def _too_many(config: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: has {len(config[name])} entries, more than {most}"
        for name, most in _MOST_ENTRIES.items()
        if isinstance(config.get(name), list | dict) and len(config[name]) > most
    ]


def _start_problems(start: object) -> list[str]:
    if (start.lower() if isinstance(start, str) else start) in _PLAIN_STARTS:
        return []
    return [
        f"init_lora_weights={start!r}: belongs to a base that this initialisation changed, or is "
        "trained in another way; convert it with PEFT's "
        "save_pretrained(path_initial_model_for_weight_conversion=...), or, if checkpoint_dir "
        "holds the changed base, set init_lora_weights to true in the file"
    ]


def _wrong_values(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if not _is_rank(config.get("r", 8)):
        problems.append(f"r={config['r']!r}: must be a whole number from 1")
    if not _is_alpha(config.get("lora_alpha", 8)):
        problems.append(f"lora_alpha={config['lora_alpha']!r}: must be a number above 0")
    dropout = config.get("lora_dropout") or 0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        problems.append(f"lora_dropout={dropout!r}: must be a number from 0, below 1")
    for field, is_right in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
        values = config.get(field) or {}
        if not isinstance(values, Mapping) or not all(map(is_right, values.values())):
            problems.append(f"{field}={values!r}: must give a positive number for each name")
        else:
            problems += _bad_expressions(field, values)
    for field in ("target_modules", "exclude_modules"):
        value = config.get(field) or []
        if isinstance(value, str):
            problems += [] if value == "all-linear" else _bad_expressions(field, [value])
        elif not isinstance(value, list | tuple) or not all(isinstance(n, str) for n in value):
            problems.append(f"{field}={value!r}: must be a list of names or an expression")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list | tuple) or not all(isinstance(name, str) for name in saved):
        problems.append(f"modules_to_save={saved!r}: must be a list of names")
    if config.get("lora_bias") and config.get("use_dora"):
        problems.append("lora_bias=True: there is no DoRA with a bias of B, in PEFT neither")
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(n, str) for n in parameters):
        problems.append(f"target_parameters={parameters!r}: must be a list of names")
    layers = config.get("layers_to_transform")
    for layer in layers if isinstance(layers, list) else [] if layers is None else [layers]:
        if not isinstance(layer, int):
            problems.append(f"layers_to_transform={layers!r}: must be numbers of layers")
            break
    return problems


def _bad_expressions(field: str, expressions: Iterable[str]) -> list[str]:
    problems = []
    for expression in expressions:
        try:
            pattern(expression)
            pattern(_at_the_end(expression))
        except ConfigError as error:
            problems.append(f"{field}: {error}")
    return problems


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _names_or_pattern(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else tuple(value or ())


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    return (value,) if isinstance(value, int) else tuple(value)
