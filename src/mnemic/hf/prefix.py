"""What a memory puts around the input of a stack, and the inputs that have no place for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mnemic.errors import UnsupportedModel, UsageError


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


def check_nothing_kept(kwargs: dict[str, Any]) -> None:
    """Refuses a KV cache where vectors behind the input would stay in it."""
    if kwargs.get("past_key_values") is not None:
        raise UsageError(
            "a memory that goes from segment to segment writes at the end of each, and a KV cache would keep what it "
            "writes: read segments without past_key_values"
        )


def check_room(kwargs: dict[str, Any], cache: Any, added: int) -> None:
    """Refuses a KV cache or a mask that has no place for what is put before the input."""
    if added and getattr(cache, "is_compileable", False):
        raise UsageError("a static KV cache has no room for memory tokens: leave cache_implementation at its default")
    mask = kwargs.get("attention_mask")
    if mask is not None and (isinstance(mask, dict) or mask.ndim != 2):
        raise UsageError("with a memory the attention_mask must be (batch, length): the memory extends it by itself")


def check_right_padded(mask: torch.Tensor | None, name: str) -> None:
    """Refuses padding between the memory and the sequence where positions are counted by place."""
    if mask is not None and not mask[:, 0].all():
        raise UnsupportedModel(
            f"{name} counts distances by place in the input, so padding on the left would come between the memory "
            "and the sequence: pad on the right (tokenizer.padding_side = 'right')"
        )
