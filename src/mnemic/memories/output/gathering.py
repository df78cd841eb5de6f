"""The memory of a whole batch: the tokens of all rows, in all processes that train together.

Each process has the loss of its own rows, and sees the tokens of all. The gradient of a token's key comes back from all
processes that saw it, so the losses and, added up over the processes, the gradients are those of one process with all
rows in the order of the ranks. Rows may differ in number and in length. All processes take part in every batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mnemic.memories.output.layer import Own
from mnemic.memories.output.testing import Piece

Meeting = Callable[[Any], list[Any]]
"""What each process brings, in the order of their ranks."""

_meeting: ContextVar[Meeting | None] = ContextVar("mnemic_meeting", default=None)


@contextlib.contextmanager
def meeting_first(meet: Meeting) -> Iterator[None]:
    """Within this context processes meet before they gather, so that none waits for one that has failed."""
    token = _meeting.set(meet)
    try:
        yield
    finally:
        _meeting.reset(token)


@dataclass(frozen=True)
class Among(Own):
    """The contexts are only some of the tokens, those from `first` on."""

    first: int = 0

    def hide(self, scores: Tensor, start: int, last: int) -> None:
        """Sets scores (R, contexts, pairs) of the contexts from `start` to `last` to -inf where a pair is not seen."""
        super().hide(scores, self.first + start, self.first + last)


def whole_batch(own: Piece, local_dropout: float) -> tuple[Piece, Own]:
    """The tokens of all rows of all processes, (1, M), and what the process' own N contexts see of them.

    With probability `local_dropout` a row goes without its local memory. Which do is drawn by the first process, for
    all: it draws what one process with all rows would.
    """
    rows, length = own.values.shape
    meet, device = _meeting.get(), own.keys.device
    brought = [rows, rows * length, int(torch.randint(2**53, ()))]
    everyone = _exchange(brought, device) if meet is None else meet(brought)
    row_counts, counts, draws = zip(*everyone, strict=True)
    rank = dist.get_rank() if len(counts) > 1 else 0

    numbers = torch.arange(rows, device=device)[:, None].expand(rows, length) + sum(row_counts[:rank])
    marks = _of_all(torch.stack([own.values, own.documents, numbers], -1).flatten(0, 1), counts)
    values, documents, segments = marks.t().contiguous()[:, None]
    chance = torch.rand(sum(row_counts), generator=torch.Generator().manual_seed(draws[0]))
    local = (chance >= local_dropout).to(device)[segments]
    keys = _Gather.apply(own.keys.flatten(0, 1), counts, meet)
    return Piece(keys[None], values, documents), Among(documents, segments, local, sum(counts[:rank]))


def _exchange(numbers: list[int], device: torch.device) -> list[list[int]]:
    """The numbers of each process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [numbers]
    own = torch.tensor(numbers, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [theirs.tolist() for theirs in everyone]


def _of_all(own: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The rows (N, ...) of all processes, one after the other; `counts` says how many each has."""
    if len(counts) == 1:
        return own
    filled = torch.cat([own, own.new_zeros(max(counts) - len(own), *own.shape[1:])])
    everyone = [torch.empty_like(filled) for _ in counts]
    dist.all_gather(everyone, filled)
    return torch.cat([theirs[:count] for theirs, count in zip(everyone, counts, strict=True)])


class _Gather(torch.autograd.Function):
    """`_of_all` with gradients: a row's is the sum of what the processes have for it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], meet: Meeting | None) -> Tensor:
        ctx.counts, ctx.meet = counts, meet  # kept, for the backward pass may run in a thread without the context
        return _of_all(own, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), counts = gradients, list(ctx.counts)
        if len(counts) == 1:
            return gradient, None, None
        if ctx.meet is not None:
            ctx.meet(None)
        own = counts[dist.get_rank()]
        parts = gradient.new_empty(len(counts) * own, gradient.shape[1])
        dist.all_to_all_single(parts, gradient.contiguous(), [own] * len(counts), counts)
        return parts.view(len(counts), own, -1).sum(0), None, None
