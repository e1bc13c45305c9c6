"""The hyper-parameters of a LoRA or DoRA adapter, and its scale."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpointing.errors import ConfigError


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter (Hu et al. 2021) or DoRA adapter (Liu et al. 2024) in native names.

    Attributes:
        r: rank.
        alpha: numerator of the scale.
        target_modules: last part of the native module names that carry an adapter: of
            ``q_proj, k_proj, v_proj, output_proj, w1, w2, w3, output``.
        dropout: probability of dropping an input element of ``A`` in training.
        use_dora: the adapter has a magnitude per output row.
        use_rslora: scale by ``alpha / sqrt(r)`` (Kalajdzievski 2023) instead of ``alpha / r``.
        rank_pattern: rank of single modules, by full native name; ``r`` for the others.
        alpha_pattern: alpha of single modules, by full native name; ``alpha`` for the others.
    """

    r: int
    alpha: float
    target_modules: tuple[str, ...]
    dropout: float = 0.0
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = [self.r, *self.rank_pattern.values()]
        alphas = [self.alpha, *self.alpha_pattern.values()]
        if min(ranks) < 1 or min(alphas) <= 0 or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"adapter: rank {self.r}, alpha {self.alpha}, dropout {self.dropout}, patterns "
                f"{dict(self.rank_pattern)}, {dict(self.alpha_pattern)}: ranks must be at least 1, "
                "alphas positive and the dropout at least 0 and below 1"
            )

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
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "AdapterConfig":
        """Reads the ``adapter_config`` entry of a state dict; torchtune's four keys are enough.

        Raises:
            ConfigError: if a key is missing, unknown, or names another method than LoRA.
        """
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
        return cls(
            r=state["r"],
            alpha=state["lora_alpha"],
            target_modules=tuple(state["target_modules"]),
            dropout=state.get("lora_dropout", 0.0),
            use_dora=state.get("use_dora", False),
            use_rslora=state.get("use_rslora", False),
            rank_pattern=dict(state.get("rank_pattern", {})),
            alpha_pattern=dict(state.get("alpha_pattern", {})),
        )
