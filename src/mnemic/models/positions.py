"""The four ways in which positions enter attention, computed from position numbers, never from indices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mnemic.models.config import MnemicDecoderConfig
from mnemic.models.layout import Layout

BLOCK = 128  # queries whose position scores are computed at a time


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
    """A learned number per head and bucket of distances, added to the scores of all layers (arXiv 1910.10683).

    It is the table's entry times the square root of the width: an optimiser that moves all weights alike would take
    thousands of steps to tell neighbours from others by the entry alone.
    """

    def __init__(self, config: MnemicDecoderConfig) -> None:
        super().__init__()
        self.max_distance = config.relative_max_distance
        self.scale = config.hidden_size**0.5
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads, config.relative_buckets))

    def forward(self, distances: Tensor) -> Tensor:
        """The bias (B or 1, heads, T, K) for distances (B or 1, T, K)."""
        bias = (self.weight * self.scale).index_select(1, self.buckets(distances).flatten())
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

    def forward(self, query: Tensor, terms: XLTerms, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The query (B, heads, T, width) with the content bias, and the masked position scores (B, heads, T, K)."""
        heads, width = self.position_bias.shape
        keys = self.projection(terms.sinusoids * self.scaling).view(-1, heads, width).transpose(0, 1)
        content, place = (bias.to(query.dtype)[:, None] for bias in (self.content_bias, self.position_bias))
        if terms.index is None:
            return query + content, _PositionScores.apply(query + place, keys, mask)
        index = terms.index.unsqueeze(1).expand(query.shape[0], heads, -1, -1)
        scores = ((query + place) @ keys.transpose(1, 2)).gather(3, index)
        return query + content, scores if mask is None else scores + mask


class _PositionScores(torch.autograd.Function):
    """Mask + query x the key of its distance to each token, for queries that are the last T of K tokens in step.

    Queries are worked on in blocks, and a block is such a case of its own: its queries are the last of the tokens up
    to its end. So the products with tokens that come after a block are never computed.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, keys)
        scores = query.new_zeros(*query.shape[:3], keys.shape[1])
        if mask is not None:
            scores.copy_(mask)
        for row, queries, tokens in _blocks_in_step(scores):
            asked, known = query[row, :, queries], keys[:, -tokens:]
            heads, count, _ = asked.shape
            by_distance = asked.new_zeros(heads, count, tokens + 1)
            torch.bmm(asked, known.transpose(1, 2), out=by_distance[..., :-1])
            scores[row, :, queries, :tokens] += _by_token(by_distance)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        query, keys = ctx.saved_tensors
        above = gradients[0]
        to_query, to_keys = torch.empty_like(query), torch.zeros_like(keys)
        for row, queries, tokens in _blocks_in_step(above):
            slope = _by_distance(above[row, :, queries, :tokens])
            to_query[row, :, queries] = torch.bmm(slope, keys[:, -tokens:])
            to_keys[:, -tokens:] += torch.bmm(slope.transpose(1, 2), query[row, :, queries])
        return to_query, to_keys, None


def _blocks_in_step(scores: Tensor) -> Iterator[tuple[int, slice, int]]:
    """Rows of the batch, blocks of queries, and how many tokens there are up to the end of a block."""
    batch, _, queries, tokens = scores.shape
    for row in range(batch):  # one row at a time: the work stays in the processor's cache
        for first in range(0, queries, BLOCK):
            end = min(first + BLOCK, queries)
            yield row, slice(first, end), tokens - queries + end


def _by_token(scores: Tensor) -> Tensor:
    """Scores (heads, T, K + 1) sorted by falling distance, the last column unused, seen as scores by token.

    Row t begins one token later than row t + 1 (the paper's appendix B): reading with rows one shorter moves them so.
    """
    heads, queries, width = scores.shape
    return scores.flatten(1)[:, queries - 1 : -1].view(heads, queries, width - 1)


def _by_distance(scores: Tensor) -> Tensor:
    """The reverse: scores (heads, T, K) by token, sorted by falling distance, with nothing where no token is."""
    heads, queries, tokens = scores.shape
    padded = nn.functional.pad(scores.flatten(1), (queries - 1, 1))
    return padded.view(heads, queries, tokens + 1)[..., :-1]
