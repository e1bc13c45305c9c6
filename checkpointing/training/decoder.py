"""The native decoder: what the recipes train, built from a checkpoint's own config."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.training.rope import rope_frequencies, rotate, rotation


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in fp32.

    Args:
        size: of the last dimension.
        eps: added to the mean of the squares.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``[..., size]``; keeps the dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.scale * normed.type_as(x)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dims = config.dims
        self.dims = dims
        self.q_proj = nn.Linear(dims.hidden, dims.query, bias=dims.attention_bias)
        self.k_proj = nn.Linear(dims.hidden, dims.key_value, bias=dims.attention_bias)
        self.v_proj = nn.Linear(dims.hidden, dims.key_value, bias=dims.attention_bias)
        self.output_proj = nn.Linear(dims.query, dims.hidden, bias=dims.attention_bias)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attends within ``x [batch, seq, hidden]``.

        Args:
            x: the normed residual stream.
            angles: from :func:`checkpointing.training.rope.rotation`.
            mask: boolean ``[batch or 1, 1, seq, seq]``, true where a token (dimension 2) attends
                to another (dimension 3); ``None`` for plain causal attention.
        """
        dims = self.dims
        q = rotate(self.q_proj(x).unflatten(-1, (dims.heads, dims.head_dim)), *angles)
        k = rotate(self.k_proj(x).unflatten(-1, (dims.kv_heads, dims.head_dim)), *angles)
        v = self.v_proj(x).unflatten(-1, (dims.kv_heads, dims.head_dim))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=dims.kv_heads != dims.heads,
        )
        return self.output_proj(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dims = config.dims
        self.w1 = nn.Linear(dims.hidden, dims.ffn, bias=dims.mlp_bias)
        self.w2 = nn.Linear(dims.ffn, dims.hidden, bias=dims.mlp_bias)
        self.w3 = nn.Linear(dims.hidden, dims.ffn, bias=dims.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., hidden]`` to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.sa_norm = RMSNorm(config.dims.hidden, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.dims.hidden, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Maps the residual stream ``[batch, seq, hidden]``; arguments as in :class:`Attention`."""
        x = x + self.attn(self.sa_norm(x), angles, mask)
        return x + self.mlp(self.mlp_norm(x))


class TransformerDecoder(nn.Module):
    """A Llama-like decoder with torchtune's parameter names.

    Args:
        config: sizes and constants. The weights are random; :func:`build_decoder` gives a model
            with a checkpoint's weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dims = config.dims
        self.config = config
        self.tok_embeddings = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(dims.layers))
        self.norm = RMSNorm(dims.hidden, config.norm_eps)
        self.output = None if dims.tied else nn.Linear(dims.hidden, dims.vocab, bias=False)
        # Not a buffer: it must stay fp32 when the model is cast, and be real on the meta device.
        self._frequencies = rope_frequencies(config)

    def forward(
        self,
        tokens: Tensor,
        *,
        input_pos: Tensor | None = None,
        document_ids: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: ids ``[batch, seq]``.
            input_pos: position of each token in its document, ``[batch, seq]``; ``None``: counted
                from the start of the row.
            document_ids: integers ``[batch, seq]``; a token attends only to tokens with its own
                id. ``None``: each row is one document.
            wanted: boolean ``[batch, seq]``, the positions whose logits are computed; a loss on
                few positions needs no logits for the others. ``None``: all.

        Returns:
            ``[batch, seq, vocab]``, or ``[number of wanted positions, vocab]``.

        Raises:
            ConfigError: if the rows are longer than the model's context.
        """
        length = tokens.shape[1]
        if length > self.config.max_seq_len:
            raise ConfigError(
                f"sequences of {length} tokens are longer than the model's context of "
                f"{self.config.max_seq_len}; set tokenizer.max_seq_len to at most that"
            )
        if input_pos is None:
            input_pos = torch.arange(length, device=tokens.device)[None]
        if self._frequencies.device != tokens.device:
            self._frequencies = self._frequencies.to(tokens.device)
        angles = rotation(input_pos, self._frequencies)
        mask = attention_mask(length, self.config.sliding_window, document_ids, tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles, mask)
        x = self.norm(x if wanted is None else x[wanted])
        if self.output is None:
            return F.linear(x, self.tok_embeddings.weight)
        return self.output(x)


def attention_mask(
    length: int,
    sliding_window: int | None,
    document_ids: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Which token attends to which.

    Args:
        length: tokens in a row.
        sliding_window: a token attends to this many last tokens, itself included.
        document_ids: ``[batch, length]``.
        device: where the mask is made.

    Returns:
        Boolean ``[batch or 1, 1, length, length]``; ``None`` if plain causal attention is meant.
    """
    window = length if sliding_window is None else sliding_window
    if document_ids is None and window >= length:
        return None
    index = torch.arange(length, device=device)
    back = index[:, None] - index
    mask = ((back >= 0) & (back < window))[None, None]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return mask


def build_decoder(
    config: ModelConfig,
    state_dict: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    copy: bool = True,
) -> TransformerDecoder:
    """A decoder with the weights of a native state dict.

    No memory is spent on random weights.

    Args:
        config: of the checkpoint.
        state_dict: native names; floating point tensors of any dtype.
        dtype: of the model's parameters.
        device: of the model's parameters.
        copy: the parameters own their memory, as they must where they are trained. ``False``:
            they may share memory with ``state_dict``, which is then never to be written to.

    Raises:
        ConfigError: if the model has features that the decoder does not compute.
        TensorMismatchError: if tensors are missing, unexpected or misshapen; all in one error.
    """
    if config.unsupported:
        raise ConfigError(
            f"this {config.family} model cannot be trained here: the native decoder does not "
            f"compute {', '.join(config.unsupported)}; its checkpoint can be converted all the same"
        )
    with torch.device("meta"):
        model = TransformerDecoder(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_tensors(expected, state_dict, "weights do not fit the model's config")
    weights = {
        name: state_dict[name].to(device=device, dtype=dtype, copy=copy).contiguous()
        for name in expected
    }
    model.load_state_dict(weights, assign=True)
    return model


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor], subject: str
) -> None:
    """Compares names and shapes.

    Raises:
        TensorMismatchError: with a line for each missing, unexpected or misshapen tensor.
    """
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: unexpected" for name in found if name not in expected]
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            problems.append(f"{name}: shape {list(found[name].shape)}, expected {list(shape)}")
    if problems:
        raise TensorMismatchError(
            subject, problems, "Check that the weights and the config are of the same model."
        )
