"""The memories of testing: what the tokens of a batch see of them, for one setting or for many at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mnemic.errors import UsageError
from mnemic.memories.output import layer
from mnemic.memories.output.config import OutputMemory
from mnemic.memories.output.layer import Mass, Own
from mnemic.memories.output.searching import Search
from mnemic.memories.output.state import LongTerm


@dataclass(frozen=True)
class Grid:
    """Settings to compare from one reading of a text: temperatures, long-term sizes (0: none) and rows of the store.

    Without any long-term size, what was read lately is left out of it.
    """

    temperatures: tuple[float, ...] = (1.0,)
    longs: tuple[int, ...] = (0,)
    ks: tuple[int, ...] = (1024,)

    def __post_init__(self) -> None:
        for name, least in (("longs", 0), ("ks", 1)):
            numbers = getattr(self, name)
            if list(numbers) != sorted(set(numbers)) or min(numbers, default=least) < least:
                raise UsageError(f"Grid.{name} = {numbers}: expected rising numbers from {least} on")
        if not self.ks:
            raise UsageError("Grid.ks is empty: expected the numbers of rows to compare")
        if not self.temperatures or min(self.temperatures) <= 0:
            raise UsageError(f"Grid.temperatures = {self.temperatures}: expected numbers above 0")


@dataclass(frozen=True)
class Piece:
    """Tokens that are read at once: their keys (B, T, d), the token after each (NOTHING if unknown), and documents."""

    keys: Tensor
    values: Tensor
    documents: Tensor


@dataclass(frozen=True)
class Seen:
    """What the tokens of a piece see: those before them in it, those of the long-term memory, and rows of a store.

    overlap: (B,), how many of each row's first tokens are context only. search: that of the store, for tokens with a
    target.
    """

    config: OutputMemory
    piece: Piece
    targets: Tensor
    scored: Tensor
    overlap: Tensor
    state: LongTerm | None
    search: Search

    def recent(self, temperature: float) -> Mass | None:
        """The mass (B, T) of local and long-term memory together."""
        many = self.recent_many(Grid((temperature,), (self.config.long,)))
        return None if many is None else Mass(many.all[0, 0], many.target[0, 0])

    def recent_many(self, grid: Grid) -> Mass | None:
        """The same for each temperature and long-term size, (temperatures, longs, B, T)."""
        config, piece, parts = self.config, self.piece, []
        if config.local:
            queries, keys = layer.comparable(piece.keys, piece.keys, config.similarity)
            one = layer.masses(queries, keys, self.targets, piece.values, Own(piece.documents), grid.temperatures)
            parts.append(Mass(*(t.expand(-1, len(grid.longs), -1, -1) for t in (one.all, one.target))))
        if self.state is not None:
            shown = (piece.keys, self.targets, piece.documents, self.overlap)
            parts.append(self.state.masses(*shown, config.similarity, grid.temperatures, grid.longs))
        return sum(parts[1:], parts[0]) if parts else None

    def external(self, temperature: float) -> Mass | None:
        """The mass (B, T) of the rows that were found; none for tokens that the store was not searched for."""
        part = self.external_many(Grid((temperature,), ks=(self.config.k,)))
        if part is None:
            return None
        empty = torch.full(self.targets.shape, -torch.inf, dtype=part.all.dtype, device=part.all.device)
        return Mass(*(empty.masked_scatter(self.search.asked, t[0, 0]) for t in (part.all, part.target)))

    def external_many(self, grid: Grid) -> Mass | None:
        """The mass of the first rows found, for each temperature and number of rows, (temperatures, ks, N)."""
        if (found := self.search.result()) is None:
            return None
        scores, values, mask = found
        targets, parts = self.targets[self.search.asked], []
        for first, end in zip((0, *grid.ks), grid.ks, strict=False):
            few = slice(first, max(end, first + 1))
            each = [
                layer.mass_of_found(scores[:, few] / temperature, targets, values[:, few], mask[:, few])
                for temperature in grid.temperatures
            ]
            parts.append(Mass(*(torch.stack([getattr(m, name) for m in each]) for name in ("all", "target"))))
        totals = (torch.stack([getattr(part, name) for part in parts], 1) for name in ("all", "target"))
        return Mass(*(total.logcumsumexp(1) for total in totals))


@dataclass(frozen=True)
class Survey:
    """What is needed of N scored tokens to know their losses under every setting of a grid.

    losses and normalisers: (N,), of the model alone. recent: (temperatures, longs, N); external: (temperatures, ks, N).
    keys: (N, d), if a gate is to learn from them.
    """

    losses: Tensor
    normalisers: Tensor
    keys: Tensor | None
    recent: Mass | None
    external: Mass | None

    @classmethod
    def of(cls, seen: Seen, losses: Tensor, normalisers: Tensor, grid: Grid) -> Self:
        """The survey of one piece."""
        recent = seen.recent_many(grid) if grid.longs else None
        if recent is not None:
            recent = Mass(recent.all[..., seen.scored].cpu(), recent.target[..., seen.scored].cpu())
        external = seen.external_many(grid)
        if external is not None:
            external = Mass(external.all.cpu(), external.target.cpu())
        keys = seen.piece.keys[seen.scored].cpu() if seen.config.retrieve < 1 else None
        return cls(losses[seen.scored].cpu(), normalisers[seen.scored].cpu(), keys, recent, external)

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """The survey of several pieces, as of one."""

        def whole(name: str) -> Mass | None:
            masses = [getattr(part, name) for part in parts]
            if masses[0] is None:
                return None
            return Mass(*(torch.cat([getattr(m, total) for m in masses], -1) for total in ("all", "target")))

        losses, normalisers = (torch.cat([getattr(part, name) for part in parts]) for name in ("losses", "normalisers"))
        keys = torch.cat([part.keys for part in parts]) if parts[0].keys is not None else None  # type: ignore[misc]
        return cls(losses, normalisers, keys, whole("recent"), whole("external"))

    def nothing_found(self) -> Self:
        """The survey of the same tokens if no row of the store had been found for them."""
        if self.external is None:
            return self
        empty = torch.full_like(self.external.all, -torch.inf)
        return dataclasses.replace(self, external=Mass(empty, empty))

    def __len__(self) -> int:
        return len(self.losses)
