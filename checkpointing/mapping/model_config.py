"""What a model's own config file says of it, whatever the format it was read from."""

from dataclasses import dataclass

from checkpointing.mapping.rope_scaling import RopeScaling


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
        experts: number of experts in a mixture-of-experts layer.
        expert_ffn: width of an expert's feed-forward layer.
        shared_ffn: width of the feed-forward layer that all tokens share beside the experts.
        labels: rows of the head of a classifier.
        expert_layers: the layers that are mixtures of experts; the others are dense.
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
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    labels: int = 0
    expert_layers: tuple[int, ...] = ()

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Numbers of the layers."""
        return tuple(range(self.layers))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that are no mixtures of experts."""
        return tuple(layer for layer in self.all_layers if layer not in self.expert_layers)

    @property
    def query(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Rows of the key and of the value projection."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to map a model's tensors and to build its native decoder.

    Attributes:
        family: name of the family, a key of ``checkpointing.families.FAMILIES``.
        dims: sizes.
        norm_eps: epsilon of the norms.
        rope_theta: base of the rotary frequencies; ``None`` for a model without rotary positions.
        rope_scaling: ``None`` for plain RoPE.
        max_seq_len: longest context that the model was made for, in tokens.
        sliding_window: a token attends to this many last tokens, itself included; ``None``: all.
        full_attention_layers: layers in which a token attends to all, in spite of the window.
        sliding_rope_theta: base of the rotary frequencies in the layers that slide their window;
            ``None``: they have the same positions as all others.
        sliding_rope_scaling: the scaling in these layers, if their base is their own.
        no_rope_layers: layers without positions.
        rotary_dim: elements of a head, from its first on, that are rotated; ``None``: all.
        activation: of the feed-forward layer: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; in a
            family without a native decoder by the name that config.json has for it.
        attention_scale: what the products of queries and keys are multiplied with; ``None`` for
            ``head_dim ** -0.5``.
        attention_softcap: c of ``c tanh(x / c)`` on these products; ``None`` for none.
        output_softcap: the same on the logits.
        experts_per_token: number of experts that a token goes to.
        normalizes_experts: the weights of a token's experts sum to 1.
        unsupported: features of the model that the native decoder does not compute. Its tensors
            can be mapped all the same.
    """

    family: str
    dims: Dims
    norm_eps: float
    rope_theta: float | None
    rope_scaling: RopeScaling | None
    max_seq_len: int
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    sliding_rope_theta: float | None = None
    sliding_rope_scaling: RopeScaling | None = None
    no_rope_layers: tuple[int, ...] = ()
    rotary_dim: int | None = None
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    output_softcap: float | None = None
    experts_per_token: int = 0
    normalizes_experts: bool = False
    unsupported: tuple[str, ...] = ()
