"""The logits of a forward with a memory: probabilities of the whole vocabulary, as generation needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from mnemic.memories.output import layer
from mnemic.memories.output.config import OutputMemory
from mnemic.memories.output.layer import NOTHING, precise
from mnemic.memories.output.searching import Rows
from mnemic.memories.output.testing import Piece

Part = tuple[Tensor, Tensor]
"""Similarities (B, T, M), -inf where a pair is not seen, and values: of one memory."""


def of_recent(queries: Tensor, documents: Tensor, pairs: Piece, similarity: str) -> Part:
    """What contexts (B, T, d), the last of those in `pairs`, see of the pairs before them in their document."""
    asked, keys = layer.comparable(queries, precise(pairs.keys), similarity)
    place = torch.arange(keys.shape[1], device=keys.device)
    seen = (place < place[-queries.shape[1] :, None]) & (documents[:, :, None] == pairs.documents[:, None])
    seen &= (pairs.values != NOTHING)[:, None]
    scores = (asked @ keys.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    return scores, pairs.values[:, None].expand(-1, queries.shape[1], -1)


def of_store(asked: Tensor, found: Rows) -> Part:
    """The rows that were found for the contexts (B, T) that were asked about."""
    scores, tokens, mask = found
    shape, places = (*asked.shape, scores.shape[1]), asked[..., None]
    scores = scores.masked_fill(~mask, -torch.inf)
    spread = scores.new_full(shape, -torch.inf).masked_scatter(places, scores)
    return spread, tokens.new_zeros(shape).masked_scatter(places, tokens)


def with_memory(logits: Tensor, normalisers: Tensor, parts: list[Part], config: OutputMemory) -> Tensor:
    """The logits (B, T, V), changed by what the memories hold; where they are empty, as they were."""
    if not parts:
        return logits
    final, size = precise(logits).log_softmax(-1), logits.shape[-1]
    if config.joint:
        scores, values = (torch.cat(column, -1) for column in zip(*parts, strict=True))
        final = layer.joint_distribution(final, normalisers, layer.spread(scores / config.temperature, values, size))
    if config.weight:
        own, there = _own_distribution(parts, size, config)
        final = layer.mixed_distribution(final, own, config.weight * there.unsqueeze(-1).to(own.dtype))
    empty = torch.stack([(scores == -torch.inf).all(-1) for scores, _ in parts]).all(0).unsqueeze(-1)
    return torch.where(empty, logits, (final + normalisers.unsqueeze(-1)).to(logits.dtype))


def _own_distribution(parts: list[Part], size: int, config: OutputMemory) -> tuple[Tensor, Tensor]:
    """The logarithm of the memories' own distribution (B, T, V), and where there is any (B, T)."""
    if config.recent_weight is None or len(parts) == 1:
        scores, values = (torch.cat(column, -1) for column in zip(*parts, strict=True))
        return _normalised(*layer.spread(scores / config.mix_temperature, values, size))
    temperatures = (config.recent_temperature or config.mix_temperature, config.mix_temperature)
    each = [
        _normalised(*layer.spread(scores / temperature, values, size))
        for (scores, values), temperature in zip(parts, temperatures, strict=True)
    ]
    (recent, some_recent), (external, some_external) = each
    share = torch.where(some_external, torch.where(some_recent, config.recent_weight, 0.0), 1.0).unsqueeze(-1)
    return layer.mixed_distribution(external, recent, share), some_recent | some_external


def _normalised(masses: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    there = total > -torch.inf
    return masses - total.masked_fill(~there, 0).unsqueeze(-1), there
