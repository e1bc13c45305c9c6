"""What a model's own config file says of it, whatever the format it was read from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dims:
    """Sizes of a decoder, as its tensors have them.

    Attributes:
        layers: number of transformer layers.
        vocab: rows of the token embedding.
        hidden: width of the residual stream.
        ffn: width of the feed-forward layer.
        heads: query heads.
        kv_heads: key and value heads; fewer than ``heads`` for grouped-query attention.
        head_dim: width of a head; not always ``hidden / heads``.
        tied: the output projection is the token embedding; there is no ``output.weight``.
        attention_bias: q, k, v and output projections have biases.
        mlp_bias: the three feed-forward projections have biases.
    """

    layers: int
    vocab: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def query(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Rows of the key and of the value projection."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling of RoPE, as in Meta's reference code.

    Attributes:
        factor: by which the low frequencies are divided.
        low_freq_factor: wavelengths above ``original_max_seq_len / low_freq_factor`` are scaled.
        high_freq_factor: wavelengths below ``original_max_seq_len / high_freq_factor`` are kept.
        original_max_seq_len: context length before the scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to map a model's tensors and to build its native decoder.

    Attributes:
        family: name of the family, a key of ``checkpointing.families.FAMILIES``.
        dims: sizes.
        norm_eps: epsilon of the RMS norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: ``None`` for plain RoPE.
        max_seq_len: longest context that the model was made for, in tokens.
        sliding_window: a token attends to this many last tokens, itself included; ``None``: all.
        full_attention_layers: layers in which a token attends to all, in spite of the window.
        no_rope_layers: layers without positions.
        rotary_dim: elements of a head, from its first on, that are rotated; ``None``: all.
        activation: of the feed-forward layer: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        attention_scale: what the products of queries and keys are multiplied with; ``None`` for
            ``head_dim ** -0.5``.
        attention_softcap: c of ``c tanh(x / c)`` on these products; ``None`` for none.
        output_softcap: the same on the logits.
        unsupported: features of the model that the native decoder does not compute. Its tensors
            can be mapped all the same.
    """

    family: str
    dims: Dims
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_seq_len: int
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    no_rope_layers: tuple[int, ...] = ()
    rotary_dim: int | None = None
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    output_softcap: float | None = None
    unsupported: tuple[str, ...] = ()
