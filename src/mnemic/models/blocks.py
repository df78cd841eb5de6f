"""The transformer block that decoder and encoder-decoder share, and the embedding that is scaled."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from mnemic.models.attention import CrossAttention, PositionTerms, ResidualLinear, SelfAttention
from mnemic.models.cache import Segment
from mnemic.models.config import BackboneConfig


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times a constant: sqrt(width) where fixed sinusoids are added, as in arXiv 1706.03762."""

    def __init__(self, count: int, width: int, scale: float) -> None:
        super().__init__(count, width)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings (..., width)."""
        return super().forward(input) * self.scale


class Mlp(nn.Module):
    """The feed-forward sublayer."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        width: int = config.intermediate_size  # type: ignore[assignment]
        self.up_proj = nn.Linear(config.hidden_size, width)
        self.down_proj = ResidualLinear(width, config.hidden_size)
        self.activation = F.gelu if config.activation == "gelu" else F.relu

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The sublayer's output, of the input's shape."""
        return self.down_proj(self.activation(self.up_proj(hidden_states)))


class Block(GradientCheckpointingLayer):
    """Self-attention, cross-attention if there is an encoder, feed-forward; each with its normalisation and residual.

    Before a sublayer (pre-norm) x becomes x + f(norm(x)), after it (post-norm) norm(x + f(x)).
    """

    _can_checkpoint_with_cache = True  # a Segment is read and written rightly when a layer runs twice

    def __init__(self, config: BackboneConfig, layer_idx: int, causal: bool, pre_norm: bool, cross: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.dropout = config.dropout
        self.self_attn = SelfAttention(config, layer_idx, is_causal=causal)
        self.self_attn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if cross:
            self.cross_attn = CrossAttention(config, layer_idx)
            self.cross_attn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        position_terms: PositionTerms = None,
        past_key_values: Cache | Segment | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The block's output (B, T, hidden_size)."""
        own = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            own = past_key_values.self_attention_cache
        attended, _ = self.self_attn(
            self._before(hidden_states, self.self_attn_norm),
            attention_mask,
            position_terms=position_terms,
            past_key_values=own,
            **kwargs,
        )
        hidden_states = self._after(hidden_states, attended, self.self_attn_norm)
        if encoder_hidden_states is not None:
            attended, _ = self.cross_attn(
                self._before(hidden_states, self.cross_attn_norm),
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            hidden_states = self._after(hidden_states, attended, self.cross_attn_norm)
        fed = self.mlp(self._before(hidden_states, self.mlp_norm))
        return self._after(hidden_states, fed, self.mlp_norm)

    def read(self, hidden_states: Tensor, memory: Tensor, **kwargs: Any) -> Tensor:
        """The block's output where its attention reads `memory` (B, M, hidden_size), and not the sequence itself."""
        attended, _ = self.attend_to(hidden_states, memory, **kwargs)
        hidden_states = self._after(hidden_states, attended, self.self_attn_norm)
        fed = self.mlp(self._before(hidden_states, self.mlp_norm))
        return self._after(hidden_states, fed, self.mlp_norm)

    def attend_to(self, hidden_states: Tensor, memory: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """What the block's attention finds in `memory` alone, and its weights where the attention function has them."""
        return self.self_attn.read(
            self._before(hidden_states, self.self_attn_norm), self._before(memory, self.self_attn_norm), **kwargs
        )

    def _before(self, hidden_states: Tensor, norm: nn.Module) -> Tensor:
        return norm(hidden_states) if self.pre_norm else hidden_states

    def _after(self, residual: Tensor, added: Tensor, norm: nn.Module) -> Tensor:
        if self.training and self.dropout:
            added = F.dropout(added, p=self.dropout)
        return residual + added if self.pre_norm else norm(residual + added)
