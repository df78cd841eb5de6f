"""What is being read: the forward of a stack that is under way, in this thread or task, and what is known of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch

from mnemic.hf import masks


@dataclass(frozen=True)
class Call:
    """One forward of a stack that is under way; calls of several stacks may be inside each other."""

    entrance: Any  # that of the stack
    mask_token: Token
    outer: Call | None
    prefix: int = 0
    suffix: int = 0
    groups: int = 1
    rows: int = 0
    positions: torch.Tensor | None = None
    xl_cache: Any = None
    mask: torch.Tensor | None = None


current: ContextVar[Call | None] = ContextVar("mnemic_call", default=None)
_document_starts: ContextVar[torch.Tensor | None] = ContextVar("mnemic_document_starts", default=None)


@contextlib.contextmanager
def reading(document_starts: torch.Tensor | None) -> Iterator[None]:
    """For the time of one forward, tells the stack where documents start."""
    token, call, changes = _document_starts.set(document_starts), current.get(), masks.active()
    try:
        yield
    finally:  # a forward that is stopped by hand, as in a notebook, does not call the hooks that end it
        _document_starts.reset(token)
        current.set(call)
        masks.put_back(changes)


def starts_being_read() -> torch.Tensor | None:
    """Where documents start in what is read now, if that was told."""
    return _document_starts.get()


def prefix_being_read() -> int:
    """How many vectors stand before the input in the forward that is under way."""
    call = current.get()
    return 0 if call is None else call.prefix


def groups_being_read() -> int:
    """In how many groups they stand: with two, the second is before documents that begin within the input."""
    call = current.get()
    return 1 if call is None else call.groups


def suffix_being_read() -> int:
    """How many vectors stand behind the input in the forward that is under way."""
    call = current.get()
    return 0 if call is None else call.suffix


def before_suffix(states: torch.Tensor) -> torch.Tensor:
    """What a module within the stack gets or gives, (B, T, d) or (B * T, d), without the vectors behind the input."""
    call = current.get()
    if call is None or not call.suffix:
        return states
    shown = states.reshape(call.rows, -1, states.shape[-1])[:, : -call.suffix]
    return shown if states.ndim == 3 else shown.flatten(0, 1)


def mask_being_read() -> torch.Tensor | None:
    """Which positions are no padding, (batch, cached and new ones), in what is read now, if that was told."""
    call = current.get()
    return None if call is None else call.mask


def prefix_read_by(entrance: Any) -> int | None:
    """How many vectors stand before the input in the forward of this entrance's stack; None if none is under way.

    None too where a layer runs once more for its gradient, also if that is within the forward of another model.
    """
    call = current.get()
    while call is not None and call.entrance is not entrance:
        call = call.outer
    return None if call is None else call.prefix


def is_reading() -> bool:
    """Whether a forward of a stack is under way; a layer that runs once more for its gradient is in none."""
    return current.get() is not None
