"""Self-attention and cross-attention, through transformers' choice of attention functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mnemic.models.biased_attention import biased_attention
from mnemic.models.cache import Segment
from mnemic.models.config import BackboneConfig, MnemicDecoderConfig
from mnemic.models.masks import additive
from mnemic.models.positions import XLRelative, XLTerms, rotate

PositionTerms = tuple[Tensor, Tensor] | XLTerms | None
"""What a layer needs to know of positions: the rotation, Transformer-XL's terms, or nothing."""


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out, for those who want to see the weights."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + additive(attention_mask, scores.dtype)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32 if scores.dtype.itemsize < 4 else None)
    weights = nn.functional.dropout(weights.to(value.dtype), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


def attention_function(name: str | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function called `name`: transformers', or our own where that is eager or slow."""
    if name == "sdpa":
        return _sdpa
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)  # type: ignore[arg-type]


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """torch's attention; for a mask that learns, on a CPU, one that does not take long over its gradient."""
    if mask is not None and mask.requires_grad and query.device.type == "cpu" and not kwargs.get("dropout"):
        return biased_attention(query, key, value, mask, kwargs["scaling"]).transpose(1, 2), None
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)


class ResidualLinear(nn.Linear):
    """A projection onto the residual stream; it begins smaller the more of them a model has."""


class Attention(nn.Module):
    """What self-attention and cross-attention share: the heads and the call of the chosen attention function."""

    def __init__(self, config: BackboneConfig, layer_idx: int, is_causal: bool) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.heads = config.num_attention_heads
        self.head_dim: int = config.head_dim  # type: ignore[assignment]
        self.scaling = self.head_dim**-0.5
        self.o_proj = ResidualLinear(self.heads * self.head_dim, config.hidden_size)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' output, projected, and the attention weights if the attention function gives them."""
        dropout = self.config.attention_dropout if self.training else 0.0
        if mask is not None and mask.dtype != torch.bool:  # under autocast the heads may be narrower than the mask
            mask = additive(mask, query.dtype)
        attention = attention_function(self.config._attn_implementation)
        output, weights = attention(self, query, key, value, mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(output.flatten(2)), weights


class SelfAttention(Attention):
    """Attention of a sequence to itself and to its cached past."""

    def __init__(self, config: BackboneConfig, layer_idx: int, is_causal: bool) -> None:
        super().__init__(config, layer_idx, is_causal)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * self.heads * self.head_dim)
        self.relative: XLRelative | None = None
        if isinstance(config, MnemicDecoderConfig) and config.position == "xl":
            self.relative = XLRelative(config, self.heads, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_terms: PositionTerms = None,
        past_key_values: Cache | Segment | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention's output (B, T, hidden_size), and its weights where the attention function gives them."""
        states = self.qkv_proj(hidden_states).unflatten(2, (3, self.heads, self.head_dim))
        if isinstance(position_terms, tuple):
            query, key = (part.transpose(1, 2) for part in rotate(states[:, :, :2], position_terms).unbind(2))
            value = states[:, :, 2].transpose(1, 2)
        else:
            query, key, value = (part.transpose(1, 2) for part in states.unbind(2))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if self.relative is not None and isinstance(position_terms, XLTerms):
            query, attention_mask = self.relative(query, position_terms, attention_mask)
        return self.attend(query, key, value, attention_mask, **kwargs)

    def read(self, hidden_states: Tensor, memory: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The output (B, T, hidden_size) of a sequence that reads `memory` (B, M, hidden_size) alone, and weights."""
        length = hidden_states.shape[1]
        states = self.qkv_proj(torch.cat([hidden_states, memory], dim=1)).unflatten(2, (3, self.heads, self.head_dim))
        query, key, value = (part.transpose(1, 2) for part in states.unbind(2))
        return self.attend(query[:, :, :length], key[:, :, length:], value[:, :, length:], None, **kwargs)


class CrossAttention(Attention):
    """Attention of the decoder to the encoder's output, whose keys and values are computed once per source."""

    def __init__(self, config: BackboneConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, is_causal=False)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * self.heads * self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention's output (B, T, hidden_size), and its weights where the attention function gives them."""
        query = self.q_proj(hidden_states).unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer: Any = past_key_values.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            states = self.kv_proj(encoder_hidden_states).unflatten(2, (2, self.heads, self.head_dim))
            key, value = (part.transpose(1, 2) for part in states.unbind(2))
            if past_key_values is not None:
                key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
                past_key_values.is_updated[self.layer_idx] = True
        return self.attend(query, key, value, attention_mask, **kwargs)
