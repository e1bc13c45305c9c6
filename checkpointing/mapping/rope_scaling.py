"""How rotary positions are stretched to contexts longer than the model was first trained on."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class LinearRopeScaling:
    """Position interpolation (Chen et al. 2023).

    Attributes:
        factor: by which all frequencies are divided.
    """

    kind: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True)
class DynamicRopeScaling:
    """Dynamic NTK-aware scaling, section 3.3 of Peng et al. 2023.

    It sets in only where a sequence is longer than the model's context, and no such sequence is
    trained on; within the context it is plain RoPE.

    Attributes:
        factor: how fast the base of the frequencies grows beyond the context.
    """

    kind: ClassVar[str] = "dynamic"
    factor: float


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling of RoPE, as in Meta's reference code.

    Attributes:
        factor: by which the low frequencies are divided.
        low_freq_factor: wavelengths above ``original_max_seq_len / low_freq_factor`` are scaled.
        high_freq_factor: wavelengths below ``original_max_seq_len / high_freq_factor`` are kept.
        original_max_seq_len: context length before the scaling, in tokens.
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (Peng et al. 2023).

    Attributes:
        factor: by which the low frequencies are divided.
        original_max_seq_len: context length before the scaling, in tokens.
        beta_fast: pairs that turn more often than this in the original context are kept.
        beta_slow: pairs that turn less often than this are divided by all of ``factor``.
        truncate: the range between the two is widened to whole pairs.
        attention_factor: what cosine and sine are multiplied with; ``None``: as the paper says,
            from the other fields.
        mscale: weight of ``log(factor)`` in the attention factor, as in DeepSeek-V2; counts only
            together with ``mscale_all_dim``.
        mscale_all_dim: the same in the number that the attention factor is divided by.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024), as Phi-3 and Phi-4-mini use it.

    Attributes:
        factor: how many times the context is longer than the original one.
        original_max_seq_len: context length before the scaling, in tokens.
        short_factor: what the frequency of each pair is divided by, in sequences of up to
            ``original_max_seq_len`` tokens.
        long_factor: the same in longer ones.
        attention_factor: what cosine and sine are multiplied with; ``None``: as the paper says,
            from the other fields.
    """

    kind: ClassVar[str] = "longrope"
    factor: float
    original_max_seq_len: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float | None = None


RopeScaling = (
    LinearRopeScaling | DynamicRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling
)
