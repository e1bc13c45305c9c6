"""The hyper-parameters of a LoRA or DoRA adapter, and its scale."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from checkpointing.errors import ConfigError
from checkpointing.mapping.rules import AdapterKind, Parameter


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_rank(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_names(value: object) -> bool:
    listed = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    return listed and all(isinstance(name, str) for name in value)  # type: ignore[attr-defined]


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _by_name(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(is_right, value.values()))


# What the values of an ``adapter_config`` must be.
_RIGHT: Mapping[str, Callable[[object], bool]] = {
    "r": _is_rank,
    "lora_alpha": _is_number,
    "target_modules": _are_names,
    "lora_dropout": _is_number,
    "use_dora": _is_bool,
    "use_rslora": _is_bool,
    "rank_pattern": _by_name(_is_rank),
    "alpha_pattern": _by_name(_is_number),
    "modules_to_save": _are_names,
    "lora_bias": _is_bool,
}


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter (Hu et al. 2021) or DoRA adapter (Liu et al. 2024) in native names.

    Attributes:
        r: rank.
        alpha: numerator of the scale.
        target_modules: last part of the native module names that carry an adapter, such as
            ``q_proj, k_proj, v_proj, output_proj, w1, w2, w3, output, tok_embeddings``.
        dropout: probability of dropping an input element of ``A`` in training.
        use_dora: the adapter has a magnitude per output row.
        use_rslora: scale by ``alpha / sqrt(r)`` (Kalajdzievski 2023) instead of ``alpha / r``.
        rank_pattern: rank of single modules, by full native name; ``r`` for the others.
        alpha_pattern: alpha of single modules, by full native name; ``alpha`` for the others.
        modules_to_save: last or full native names of modules that are trained whole, beside the
            adapter. Their tensors stand among the adapter's, by the names that the base has.
        lora_bias: a bias is trained with ``B`` and scaled like it; not with DoRA.
    """

    r: int
    alpha: float
    target_modules: tuple[str, ...]
    dropout: float = 0.0
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    lora_bias: bool = False

    def __post_init__(self) -> None:
        ranks = [self.r, *self.rank_pattern.values()]
        alphas = [self.alpha, *self.alpha_pattern.values()]
        if min(ranks) < 1 or min(alphas) <= 0 or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"adapter: rank {self.r}, alpha {self.alpha}, dropout {self.dropout}, patterns "
                f"{dict(self.rank_pattern)}, {dict(self.alpha_pattern)}: ranks must be at least 1, "
                "alphas positive and the dropout at least 0 and below 1"
            )
        if self.lora_bias and self.use_dora:
            raise ConfigError(
                "adapter: lora_bias with use_dora: there is no DoRA with a bias of B, in PEFT "
                "neither; set one of them to False"
            )

    def saves(self, module: str) -> bool:
        """Whether a module is trained whole, by its full native name."""
        return module in self.modules_to_save or module.rsplit(".", 1)[-1] in self.modules_to_save

    def parameters(self, kind: AdapterKind) -> tuple[Parameter, ...]:
        """The tensors that this adapter has on a module of some kind."""
        magnitude = (kind.magnitude,) if self.use_dora and kind.magnitude is not None else ()
        bias = (kind.bias,) if self.lora_bias and kind.bias is not None else ()
        return (kind.a, kind.b, *magnitude, *bias)

    def rank(self, module: str) -> int:
        """Rank of one module's adapter, by its full native name."""
        return self.rank_pattern.get(module, self.r)

    def alpha_for(self, module: str) -> float:
        """Alpha of one module's adapter, by its full native name."""
        return self.alpha_pattern.get(module, self.alpha)

    def scale(self, module: str) -> float:
        """What ``B @ A`` of one module is multiplied with: alpha/r, or alpha/sqrt(r) for rsLoRA.

        Args:
            module: full native name, such as ``layers.0.attn.q_proj``.
        """
        rank = self.rank(module)
        alpha = self.alpha_for(module)
        return float(alpha / rank**0.5) if self.use_rslora else float(alpha / rank)

    def to_state(self) -> dict[str, Any]:
        """The ``adapter_config`` entry of a checkpoint's state dict (torchtune's keys and more)."""
        return {
            "r": self.r,
            "lora_alpha": self.alpha,
            "target_modules": list(self.target_modules),
            "peft_type": "LORA",
            "lora_dropout": self.dropout,
            "use_dora": self.use_dora,
            "use_rslora": self.use_rslora,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "modules_to_save": list(self.modules_to_save),
            "lora_bias": self.lora_bias,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "AdapterConfig":
        """Reads the ``adapter_config`` entry of a state dict; torchtune's four keys are enough.

        Raises:
            ConfigError: if a key is missing, unknown, of a wrong type, or names another method than
                LoRA.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"adapter_config: is {state!r:.80}, but must be a dictionary")
        missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in state]
        known = cls(1, 1.0, ()).to_state()
        unknown = [key for key in state if key not in known]
        if missing or unknown:
            raise ConfigError(
                f"adapter_config: missing keys {missing}, unknown keys {unknown}; "
                f"give r, lora_alpha and target_modules, and of the others only {sorted(known)}"
            )
        if state.get("peft_type", "LORA") != "LORA":
            raise ConfigError(
                f"adapter_config: peft_type {state['peft_type']!r} is not supported, only 'LORA'"
            )
        wrong = [key for key, right in _RIGHT.items() if key in state and not right(state[key])]
        if wrong:
            raise ConfigError(
                "adapter_config: "
                + ", ".join(f"{key} is {state[key]!r:.80}" for key in wrong)
                + "; ranks must be whole numbers, alphas and the dropout numbers, the modules "
                "lists of names, the patterns dictionaries of these, and the others true or false"
            )
        return cls(
            r=state["r"],
            alpha=state["lora_alpha"],
            target_modules=tuple(state["target_modules"]),
            dropout=state.get("lora_dropout", 0.0),
            use_dora=state.get("use_dora", False),
            use_rslora=state.get("use_rslora", False),
            rank_pattern=dict(state.get("rank_pattern", {})),
            alpha_pattern=dict(state.get("alpha_pattern", {})),
            modules_to_save=tuple(state.get("modules_to_save", ())),
            lora_bias=state.get("lora_bias", False),
        )
