"""What is being read: the forward of a stack that is under way, in this thread or task, and what is known of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """One forward of a stack that is under way; calls of several stacks may be inside each other."""

    entrance: Any  # that of the stack
    mask_token: Token
    outer: Call | None
    prefix: int = 0
    positions: torch.Tensor | None = None
    xl_cache: Any = None
    mask: torch.Tensor | None = None


current: ContextVar[Call | None] = ContextVar("mnemic_call", default=None)
_document_starts: ContextVar[torch.Tensor | None] = ContextVar("mnemic_document_starts", default=None)


@contextlib.contextmanager
def reading(document_starts: torch.Tensor | None) -> Iterator[None]:
    """For the time of one forward, tells the stack where documents start."""
    token = _document_starts.set(document_starts)
    try:
        yield
    finally:
        _document_starts.reset(token)


def starts_being_read() -> torch.Tensor | None:
    """Where documents start in what is read now, if that was told."""
    return _document_starts.get()


def prefix_being_read() -> int:
    """How many vectors stand before the input in the forward that is under way."""
    call = current.get()
    return 0 if call is None else call.prefix


def mask_being_read() -> torch.Tensor | None:
    """Which positions are no padding, (batch, cached and new ones), in what is read now, if that was told."""
    call = current.get()
    return None if call is None else call.mask


def is_reading() -> bool:
    """Whether a forward of a stack is under way; a layer that runs once more for its gradient is in none."""
    return current.get() is not None
