"""The four ways in which positions enter attention, computed from position numbers, never from indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mnemic.models.config import MnemicDecoderConfig
from mnemic.models.layout import Layout


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """sin and cos of the positions at geometrically spaced frequencies, arXiv 1706.03762: (..., width)."""
    angles = _angles(positions, width, 10000.0, dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def _angles(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Tensor:
    precise = torch.promote_types(dtype, torch.float32)  # half precision cannot tell large positions apart
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=precise) / width
    return positions.unsqueeze(-1).to(precise) * base**-exponents


def rotary_terms(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (B or 1, T, 1, 1, width / 2) that turn queries and keys at these positions, arXiv 2104.09864."""
    angles = _angles(positions, width, base, dtype)[:, :, None, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, terms: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (i, i + width / 2) of the last dimension by its position's angle."""
    return _Rotate.apply(states, *terms)


class _Rotate(torch.autograd.Function):
    """The rotation in two passes over memory; its gradient is the rotation back, so that nothing large is saved."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, -sin), None, None


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    turned = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    half = first.shape[-1]
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half:]).addcmul_(first, sin)
    return turned


class T5Bias(nn.Module):
    """A learned number per head and bucket of distances, added to the scores of all layers (arXiv 1910.10683)."""

    def __init__(self, config: MnemicDecoderConfig) -> None:
        super().__init__()
        self.max_distance = config.relative_max_distance
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads, config.relative_buckets))

    def forward(self, distances: Tensor) -> Tensor:
        """The bias (B or 1, heads, T, K) for distances (B or 1, T, K)."""
        bias = self.weight.index_select(1, self.buckets(distances).flatten())
        return bias.view(-1, *distances.shape).transpose(0, 1)

    def buckets(self, distances: Tensor) -> Tensor:
        """T5's causal buckets: half of them one distance each, the rest ever wider up to the largest distance."""
        count = self.weight.shape[1]
        exact = count // 2
        distances = distances.clamp(min=0)
        ratio = torch.log(distances.clamp(min=1) / exact) / math.log(self.max_distance / exact)
        wide = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return torch.where(distances < exact, distances, wide)


@dataclass(frozen=True)
class XLTerms:
    """The sinusoids of the distances that occur, and which of them belongs to each query and key."""

    sinusoids: Tensor  # (distances, hidden_size)
    index: Tensor | None  # (B or 1, T, K); None: the sinusoids are of distances K - 1, ..., 0 and a shift does it

    @classmethod
    def of(cls, layout: Layout, causal: bool, width: int, dtype: torch.dtype) -> XLTerms:
        """The terms for a layout; the shift garbles keys that come after the query, so it needs causal attention."""
        if causal and layout.in_step():
            distances = torch.arange(layout.key_positions.shape[1] - 1, -1, -1, device=layout.positions.device)
            return cls(sinusoids(distances, width, dtype), None)
        distances, index = torch.unique(layout.distances(), return_inverse=True)
        return cls(sinusoids(distances, width, dtype), index)


class XLRelative(nn.Module):
    """Transformer-XL's relative terms (arXiv 1901.02860): content bias u, position bias v and the projection of R.

    score = ((q + u) k + (q + v) (W R_distance)) / sqrt(head_dim)
    """

    def __init__(self, config: MnemicDecoderConfig, heads: int, width: int) -> None:
        super().__init__()
        self.scaling = width**-0.5
        self.content_bias = nn.Parameter(torch.empty(heads, width))
        self.position_bias = nn.Parameter(torch.empty(heads, width))
        self.projection = nn.Linear(config.hidden_size, heads * width, bias=False)

    def forward(self, query: Tensor, terms: XLTerms) -> tuple[Tensor, Tensor]:
        """The query with the content bias, and the position scores (B, heads, T, K), both for (B, heads, T, width)."""
        heads, width = self.position_bias.shape
        keys = self.projection(terms.sinusoids).view(-1, heads, width).permute(1, 2, 0)  # (heads, width, distances)
        content, place = (bias.to(query.dtype)[:, None] for bias in (self.content_bias, self.position_bias))
        scores = (query + place) * self.scaling @ keys
        if terms.index is None:
            scores = _shift(scores)
        else:
            index = terms.index.unsqueeze(1).expand(query.shape[0], heads, -1, -1)
            scores = scores.gather(3, index)
        return query + content, scores


def _shift(scores: Tensor) -> Tensor:
    """Moves row t of (B, heads, T, K), sorted by falling distance, so that columns become keys (the paper's B)."""
    batch, heads, queries, keys = scores.shape
    padded = nn.functional.pad(scores, (1, 0)).view(batch, heads, keys + 1, queries)
    return padded[:, :, 1:].reshape(batch, heads, queries, keys)
