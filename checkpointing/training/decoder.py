"""The native decoder: what the recipes train, built from a checkpoint's own config."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.adapters.config import AdapterConfig
from checkpointing.errors import ConfigError, TensorMismatchError
from checkpointing.families import FAMILIES
from checkpointing.families.decoder import LAYER
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.rules import BIAS, SCALE, TABLE
from checkpointing.mapping.tensors import is_dtensor
from checkpointing.training.moe import GroupedExperts, MixtureOfExperts, Router
from checkpointing.training.rope import RotaryEmbedding, rotate


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in fp32.

    Args:
        size: of the last dimension.
        eps: added to the mean of the squares.
        offset: added to the scale; Gemma stores its scales less 1.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``[..., size]``; keeps the dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (self.offset + self.scale.float())).type_as(x)
        return self.scale * normed.type_as(x)


def _make(config: ModelConfig, name: str) -> nn.Module:
    """A module as the family's table of native modules describes it.

    Args:
        config: of the model.
        name: the module's native name, with ``{layer}`` for the number of the layer.
    """
    family, dims = FAMILIES[config.family], config.dims
    module = family.module(name)
    out = getattr(dims, module.out)
    if SCALE in module.parameters:
        return RMSNorm(out, config.norm_eps, family.norm_offset)
    in_ = getattr(dims, module.in_)
    if TABLE in module.parameters:
        return nn.Embedding(in_, out)
    return nn.Linear(in_, out, bias=BIAS in module.parameters_for(dims))


def _make_if_any(config: ModelConfig, name: str) -> nn.Module:
    """The module, or one that changes nothing if the family has none of that name."""
    return _make(config, name) if FAMILIES[config.family].has(name) else nn.Identity()


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.dims.head_dim
        self.halves = FAMILIES[config.family].rotates_halves
        self.has_rope = layer not in config.no_rope_layers
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.q_proj = _make(config, LAYER + "attn.q_proj")
        self.k_proj = _make(config, LAYER + "attn.k_proj")
        self.v_proj = _make(config, LAYER + "attn.v_proj")
        self.output_proj = _make(config, LAYER + "attn.output_proj")
        self.q_norm = _make_if_any(config, LAYER + "attn.q_norm")
        self.k_norm = _make_if_any(config, LAYER + "attn.k_norm")
        # Over all heads (OLMo 2), or over each (Qwen 3).
        scale = getattr(self.q_norm, "scale", None)
        self.norms_all_heads = scale is not None and len(scale) == config.dims.query

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attends within ``x [batch, seq, hidden]``.

        Args:
            x: the normed residual stream.
            angles: from :func:`checkpointing.training.rope.rotation`.
            mask: boolean ``[batch or 1, 1, seq, seq]``, true where a token (dimension 2) attends
                to another (dimension 3); ``None`` for plain causal attention.
        """
        q = self._heads(self.q_proj(x), self.q_norm)
        k = self._heads(self.k_proj(x), self.k_norm)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.has_rope:
            q, k = (rotate(each, *angles, halves=self.halves) for each in (q, k))
        attended = attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, self.scale, self.softcap
        )
        return self.output_proj(attended.transpose(1, 2).flatten(-2))

    def _heads(self, projected: Tensor, norm: nn.Module) -> Tensor:
        """``[batch, seq, heads, head_dim]``, normed over each head or over all of them."""
        # With tensor parallelism these are some of the heads.
        split = (-1, self.head_dim)
        if self.norms_all_heads:
            return norm(projected).unflatten(-1, split)
        return norm(projected.unflatten(-1, split))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Scaled dot-product attention, with grouped queries and an optional soft cap.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: ``[batch, kv_heads, seq, head_dim]``.
        v: ``[batch, kv_heads, seq, head_dim]``.
        mask: as in :class:`Attention`.
        scale: ``None`` for ``head_dim ** -0.5``.
        softcap: products x become ``softcap * tanh(x / softcap)`` (Gemma 2, 2024).

    Returns:
        ``[batch, heads, seq, head_dim]``.
    """
    grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    products = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    products = softcap * torch.tanh(products / softcap)
    if mask is None:
        mask = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).tril()
    products = products.masked_fill(~mask, float("-inf"))
    return products.softmax(-1, dtype=torch.float32).type_as(q) @ v


class FeedForward(nn.Module):
    """Gated feed-forward (Shazeer 2020): ``w2(act(w1 x) * w3 x)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        self.w1 = _make(config, LAYER + "mlp.w1")
        self.w2 = _make(config, LAYER + "mlp.w2")
        self.w3 = _make(config, LAYER + "mlp.w3")

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., hidden]`` to the same shape."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def _mixture_of_experts(config: ModelConfig) -> MixtureOfExperts:
    dims = config.dims
    router = Router(
        _make(config, LAYER + "mlp.router.gate"),
        config.experts_per_token,
        config.normalizes_experts,
    )
    activation = _ACTIVATIONS[config.activation]
    experts = GroupedExperts(dims.experts, dims.hidden, dims.expert_ffn, activation)
    return MixtureOfExperts(router, experts)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream.

    The norms before (``sa_norm``, ``mlp_norm``) and after them (``sa_scale``, ``mlp_scale``) are
    those that the family has.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.slides = layer not in config.full_attention_layers
        self.attn = Attention(config, layer)
        sparse = layer in config.dims.expert_layers
        self.mlp = _mixture_of_experts(config) if sparse else FeedForward(config)
        self.sa_norm = _make_if_any(config, LAYER + "sa_norm")
        self.sa_scale = _make_if_any(config, LAYER + "sa_scale")
        self.mlp_norm = _make_if_any(config, LAYER + "mlp_norm")
        self.mlp_scale = _make_if_any(config, LAYER + "mlp_scale")

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Maps the residual stream ``[batch, seq, hidden]``; arguments as in :class:`Attention`."""
        x = x + self.sa_scale(self.attn(self.sa_norm(x), angles, mask))
        return x + self.mlp_scale(self.mlp(self.mlp_norm(x)))


class TransformerDecoder(nn.Module):
    """A decoder with torchtune's parameter names, built as its family's data says.

    Args:
        config: sizes and constants. The weights are random; :func:`build_decoder` gives a model
            with a checkpoint's weights.

    Attributes:
        adapter_config: of the adapter that the model carries, if it does.
        is_merged: for the time being, its weights have the adapter folded in.
    """

    adapter_config: AdapterConfig | None = None
    is_merged: bool = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dims = config.dims
        self.config = config
        self.tok_embeddings = _make(config, "tok_embeddings")
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(dims.layers))
        self.norm = _make(config, "norm")
        self.output = None if dims.tied else _make(config, "output")
        scaled = FAMILIES[config.family].scaled_embedding
        self.embedding_scale = dims.hidden**0.5 if scaled else None
        self._rotary = self._sliding_rotary = RotaryEmbedding(config)
        if config.sliding_rope_theta is not None:
            self._sliding_rotary = RotaryEmbedding(config, sliding=True)

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
        angles = sliding_angles = self._rotary.angles(input_pos, document_ids)
        if self._sliding_rotary is not self._rotary:
            sliding_angles = self._sliding_rotary.angles(input_pos, document_ids)
        window = self.config.sliding_window
        full = angles, attention_mask(length, None, document_ids, tokens.device)
        sliding = sliding_angles, attention_mask(length, window, document_ids, tokens.device)
        x = self.tok_embeddings(tokens)
        if self.embedding_scale is not None:
            # Rounded to the dtype first, as the model was trained.
            x = x * torch.tensor(self.embedding_scale, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, *(sliding if layer.slides else full))
        x = self.norm(x if wanted is None else x[wanted])
        logits = self._tied_output(x) if self.output is None else self.output(x)
        cap = self.config.output_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _tied_output(self, x: Tensor) -> Tensor:
        weight: Any = self.tok_embeddings.weight
        # With tensor parallelism every rank has the whole table.
        return F.linear(x, weight.to_local() if is_dtensor(weight) else weight)


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


def empty_decoder(config: ModelConfig, dtype: torch.dtype) -> TransformerDecoder:
    """A decoder without memory: its parameters are on the meta device.

    Args:
        config: of the checkpoint.
        dtype: of the model's parameters.

    Raises:
        ConfigError: if the model has features that the decoder does not compute.
    """
    if config.unsupported:
        raise ConfigError(
            f"this {config.family} model cannot be trained here: the native decoder does not "
            f"compute {', '.join(config.unsupported)}; its checkpoint can be converted all the same"
        )
    with torch.device("meta"):
        return TransformerDecoder(config).to(dtype)


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
    model = empty_decoder(config, dtype)
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
