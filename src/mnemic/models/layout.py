"""Where the queries and keys of one forward stand: positions and documents of the cached and the new tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mnemic.models.masks import PADDING, visible


@dataclass(frozen=True)
class Layout:
    """Positions and documents of T queries, the last of K keys; one row may stand for all rows of a batch."""

    positions: Tensor  # (B or 1, T) positions of the queries
    key_positions: Tensor  # (B or 1, K) positions of the keys
    documents: Tensor | None = None  # (B, K) document numbers of the keys; None: one document, no padding
    prefix: int = 0  # memory tokens among the queries, at their beginning
    suffix: int = 0  # and at their end
    fixed: bool = (
        False  # whether memory tokens, whose positions are below 0, are as far from all tokens as from the first
    )

    @property
    def cached(self) -> int:
        """Number of keys from earlier forwards."""
        return self.key_positions.shape[1] - self.positions.shape[1]

    def one_document(self) -> bool:
        """Whether all keys of each row belong to one document, without padding."""
        return self.documents is None or bool(
            ((self.documents == self.documents[:, -1:]) & (self.documents != PADDING)).all()
        )

    def visible(self) -> Tensor | None:
        """Which query sees which key, (B or 1, T, K); None where plain causal attention is enough."""
        queries, keys = self.positions.shape[1], self.key_positions.shape[1]
        order = torch.arange(keys, device=self.positions.device).unsqueeze(0)
        if self.documents is not None and not self.one_document():
            return visible(self.documents[:, -queries:], self.documents, order[:, -queries:], order)
        return None if queries == keys else order <= order[:, -queries:].transpose(0, 1).unsqueeze(0)

    def in_step(self) -> bool:
        """Whether, for every visible pair, the distance in positions is the distance in columns.

        That is so when the real tokens of a row are neighbours and count up by one within a document. Then one
        matrix of distances serves all rows, wherever each is in its document.
        """
        if self.prefix or self.fixed:
            return False
        rising = self.key_positions.diff(dim=1) == 1
        if self.documents is None:
            return bool(rising.all())
        real = self.documents != PADDING
        runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
        # A step to another document, or from or to padding, separates pairs that do not see each other anyway.
        return bool((rising | (self.documents.diff(dim=1) != 0)).all() and (runs <= 1).all())

    def distances(self) -> Tensor:
        """Query position minus key position, (B or 1, T, K)."""
        positions, key_positions = self.positions, self.key_positions
        if self.in_step():
            key_positions = torch.arange(key_positions.shape[1], device=positions.device).unsqueeze(0)
            positions = key_positions[:, -positions.shape[1] :]
        elif _rows_agree(positions) and _rows_agree(key_positions):
            positions, key_positions = positions[:1], key_positions[:1]
        queries, keys = positions.unsqueeze(-1), key_positions.unsqueeze(-2)
        if self.fixed:
            return torch.where((keys < 0) & (queries > 0), -keys, queries - keys)
        return queries - keys


def place(real: Tensor, starts: Tensor | None, position: Tensor | int, document: Tensor | int) -> tuple[Tensor, Tensor]:
    """Positions and document numbers (B, T) of new tokens of which `real` are no padding.

    Rows continue at `position` in document `document` (numbers or (B, 1)); at a start the position becomes 0 and the
    document's number rises by one. Only real tokens count.
    """
    counts = real.cumsum(1) - 1
    if starts is None:
        return counts + position, torch.where(real, document, PADDING)
    starts = starts.bool() & real
    before = -torch.as_tensor(position, device=real.device)
    began = torch.where(starts, counts, before).cummax(1).values
    return counts - began, torch.where(real, starts.cumsum(1) + document, PADDING)


def plain_layout(
    shape: tuple[int, int],
    device: torch.device,
    cached: int,
    attention_mask: Tensor | None,
    starts: Tensor | None,
    position_ids: Tensor | None,
) -> Layout:
    """The layout of a forward without an XL cache, after `cached` keys of an ordinary cache (or none).

    An ordinary cache does not know positions: those of its keys are counted back from the first new token over the
    real tokens of the 2D mask.
    """
    batch, length = shape
    flat = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
    if starts is None and flat is None:
        if position_ids is None:
            position_ids = torch.arange(cached, cached + length, device=device).unsqueeze(0)
        back = position_ids[:, :1] - torch.arange(cached, 0, -1, device=device)
        return Layout(position_ids, torch.cat([back, position_ids], dim=1))
    real = torch.ones(batch, cached + length, dtype=torch.bool, device=device)
    if flat is not None:
        real[:, -flat.shape[1] :] = flat[:, -real.shape[1] :] != 0
    if starts is not None:
        starts = torch.cat([starts.new_zeros(batch, cached), starts], dim=1)
    key_positions, documents = place(real, starts, 0, 0)
    if position_ids is not None:
        new = position_ids.expand(batch, -1)
        first = real[:, cached:].int().argmax(1, keepdim=True)  # the first new token that is no padding
        shift = new.gather(1, first) - key_positions[:, cached:].gather(1, first)
        key_positions = torch.cat([key_positions[:, :cached] + shift, new], dim=1)
    return Layout(key_positions[:, cached:], key_positions, documents)


def _rows_agree(positions: Tensor) -> bool:
    return positions.shape[0] == 1 or bool((positions == positions[:1]).all())
