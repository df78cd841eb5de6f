"""Who sees whom: the additive attention mask from document numbers and the order of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = -1
"""The document number of a token that nobody sees."""

EVERY = -2
"""The document number of a memory token: tokens of every document see it, it sees only its like."""


def visibility(
    query_documents: Tensor, key_documents: Tensor, query_order: Tensor, key_order: Tensor, dtype: torch.dtype
) -> Tensor:
    """`visible` as an additive mask (B, 1, Q, K) that can be given to a model as its attention mask.

    Where a query does not see a key it has the lowest number of `dtype`: with minus infinity instead, the
    (meaningless) output of padding, which sees nothing, would not be finite.
    """
    return additive(visible(query_documents, key_documents, query_order, key_order).unsqueeze(1), dtype)


def visible(query_documents: Tensor, key_documents: Tensor, query_order: Tensor, key_order: Tensor) -> Tensor:
    """Which query sees which key, (B, Q, K).

    A query sees the keys of its own document, and those numbered EVERY, whose order is not after its own. Documents
    are (B, Q) and (B, K) whole numbers, orders (B or 1, Q) and (B or 1, K). Tokens numbered PADDING see nothing and
    are not seen. Memory tokens of equal order all see each other, of rising order only the earlier ones.
    """
    queries, keys = query_documents.unsqueeze(-1), key_documents.unsqueeze(-2)
    seen = (queries == keys) | (keys == EVERY)
    return seen & (queries != PADDING) & (key_order.unsqueeze(-2) <= query_order.unsqueeze(-1))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A true-where-seen mask as a mask to be added to attention scores; one that is additive already is only cast.

    The lowest number of a wider type must not become minus infinity, or padding would no longer be finite.
    """
    if mask.dtype == dtype:
        return mask
    if mask.dtype != torch.bool:
        lowest = max(torch.finfo(dtype).min, torch.finfo(mask.dtype).min)
        return mask.clamp(min=lowest).to(dtype)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), hidden)


def real_tokens(mask: Tensor, length: int, before: int | None = None) -> Tensor:
    """Which of the last `length` tokens are no padding (B, length), from a 2D mask or a 4D one.

    In a 4D mask a token that may not even see itself is padding. `before` is how many keys come before those of the
    tokens; if unset, these are the last.
    """
    if mask.ndim == 2:
        return mask[:, -length:] != 0
    last = mask.shape[3] - length
    own = last if before is None else min(before, last)
    itself = mask[:, 0, -length:, own : own + length].diagonal(dim1=-2, dim2=-1)
    return itself if itself.dtype == torch.bool else itself > torch.finfo(itself.dtype).min / 2
