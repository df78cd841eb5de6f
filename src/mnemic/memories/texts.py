"""Texts that memories read before they are asked: `model.memory.read`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from mnemic.errors import UsageError

READ_ON = "read() goes on with as many texts as it has read so far: reset() the memory to begin anew"


def check_tokens(input_ids: Any, mask: Any) -> None:
    """UsageError if these are not tokens of texts, (B, T), and a mask of their shape."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        what = f"a tensor {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise UsageError(f"read() takes a tensor of token ids (texts, tokens), not {what}")
    if mask is not None and getattr(mask, "shape", None) != input_ids.shape:
        raise UsageError(f"the mask of read() has one number for each token: expected {tuple(input_ids.shape)}")


def pieces(input_ids: Tensor, mask: Tensor | None, length: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Texts (B, T) and their mask, `length` tokens at a time."""
    for begin in range(0, input_ids.shape[1], length):
        piece = slice(begin, begin + length)
        yield input_ids[:, piece], None if mask is None else mask[:, piece]


@contextlib.contextmanager
def evaluating(stack: nn.Module) -> Iterator[None]:
    """Within this context the stack is in evaluation mode."""
    training = stack.training
    stack.eval()
    try:
        yield
    finally:
        stack.train(training)
