"""What a memory puts around the input of a stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Vectors:
    """What is put around the inputs of a forward: (m, d) for all rows, or (B, m, d)."""

    before: torch.Tensor
    begun: torch.Tensor | None = None  # what documents that begin within the input have before them instead
    after: torch.Tensor | None = None

    @property
    def prefix(self) -> torch.Tensor:
        """All that comes before the input."""
        return self.before if self.begun is None else torch.cat([self.before, self.begun.expand_as(self.before)], -2)

    @property
    def groups(self) -> int:
        """In how many groups they stand there."""
        return 1 if self.begun is None else 2

    @property
    def columns(self) -> int:
        """How many of them come before the input."""
        return self.before.shape[-2] * self.groups

    @property
    def behind(self) -> int:
        """How many come behind it."""
        return 0 if self.after is None else self.after.shape[-2]


@dataclass
class Prefix:
    """Vectors to put around the input: `rows(batch, document_starts)` gives them.

    `bias()` says what to add to the scores of each that stands before the input, (m,), if anything. When they are taken
    out of the stack's output again, `outputs` is given what it holds for those before the input, and `written` for
    those behind it, (B, m, d).
    """

    rows: Callable[[int, torch.Tensor | None], Vectors]
    bias: Callable[[], torch.Tensor | None]
    by_key: bool = False  # whether layers are given which keys are no padding, (batch, 1, 1, keys), and no larger mask
    outputs: Callable[[torch.Tensor], None] | None = None
    written: Callable[[torch.Tensor], None] | None = None
    fixed: bool = False  # whether a decoder of ours is told that they are equally far from all tokens
