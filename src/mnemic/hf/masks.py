"""Changes to a model's attention masks, for the time of one forward: memory columns and document borders.

Every supported architecture asks transformers' mask interface for its masks, sliding windows and padding
included. The functions registered there are wrapped once; the wrapper does nothing unless a stack that is
running right now (in this thread or task) has asked for a change.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function

from mnemic.errors import UnsupportedModel

IMPLEMENTATIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class MaskChange:
    """What to change in the masks of the stack that is running."""

    config: Any
    """The stack's config, by which its masks are told from those of models that run inside it."""
    prefix: int = 0
    """So many keys at the beginning are seen by the whole sequence, whatever the window or the document."""
    bias: torch.Tensor | None = None
    """(prefix,) added to the scores of those keys."""
    first: int = 0
    """Where those keys begin: behind the cached ones if a model keeps them in front."""
    begun: torch.Tensor | None = None
    """(batch, length) which queries are of documents that begin within the input: they see the second half of those
    keys, the others the first, and neither half sees the other."""
    suffix: int = 0
    """So many queries at the end see all that comes before them, whatever the window."""
    documents: torch.Tensor | None = None
    """(batch, length) number of the document of each position, the prefix's included; others are not seen."""
    bidirectional: bool = False
    """Whether the prefix sees the whole sequence, whatever the window."""
    cross: bool = False
    """Whether the keys are an encoder's output; the stack's own masks are left alone."""

    def concerns(self, config: Any, mask_function: Any) -> bool:
        """Whether a mask that is being made is one to be changed, and not another one of the same stack."""
        if config is not self.config:
            return False
        of_encoded = mask_function is bidirectional_mask_function
        return of_encoded if self.cross else self.bidirectional or not of_encoded


_active: ContextVar[tuple[MaskChange, ...]] = ContextVar("mnemic_mask_changes", default=())
active = _active.get
"""The changes that are made now."""
end = _active.reset


def put_back(changes: tuple[MaskChange, ...]) -> None:
    """Makes the changes that were made at another time, as `active` told them."""
    _active.set(changes)


def begin(*changes: MaskChange | None) -> Token:
    """From now on, until `end` is given what this returns, masks are changed so."""
    asked = tuple(change for change in changes if change is not None)
    for change in asked:
        if (used := change.config._attn_implementation) not in IMPLEMENTATIONS:
            raise UnsupportedModel(
                f"attention implementation {used!r} does not take the masks that gated memories, documents and sliding "
                "windows need: call model.set_attn_implementation('sdpa')"
            )
    return _active.set(asked)


def install() -> None:
    """Wraps transformers' mask functions; safe to call again."""
    for name in IMPLEMENTATIONS:
        function = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not hasattr(function, "unchanged"):
            ALL_MASK_ATTENTION_FUNCTIONS[name] = _changeable(function)


def _changeable(unchanged: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        asked = (one for one in _active.get() if one.concerns(kwargs.get("config"), kwargs.get("mask_function")))
        change = next(asked, None)
        if change is None:
            return unchanged(*args, **kwargs)
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        own = unchanged(*args, **kwargs)
        return None if own is None else _changed(change, own, **kwargs)

    mask.unchanged = unchanged  # type: ignore[attr-defined]
    return mask


def _changed(
    change: MaskChange,
    mask: torch.Tensor,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """The additive mask (batch, 1, q, kv) with the change in it."""
    visible = (mask if mask.dtype == torch.bool else mask == 0).expand(-1, -1, q_length, kv_length).clone()
    in_prefix = max(change.prefix - q_offset, 0)  # how many of the queries belong to the prefix
    if change.suffix:
        before = torch.ones_like(visible[:, :, -change.suffix :]).tril(kv_length - change.suffix)
        if attention_mask is not None:
            before &= attention_mask[:, None, None, kv_offset : kv_offset + kv_length].bool()
        visible[:, :, -change.suffix :] = before
    if change.documents is not None:
        queries = change.documents[:, q_offset : q_offset + q_length, None]
        keys = change.documents[:, None, kv_offset : kv_offset + kv_length]
        visible &= (keys == queries)[:, None]
    if not change.cross:
        end = change.first + change.prefix
        visible[:, :, in_prefix:, change.first : end] = True
        if change.begun is not None:
            half = change.prefix // 2
            begun = change.begun[:, None, q_offset + in_prefix : q_offset + q_length, None]
            visible[:, :, in_prefix:, change.first : end - half] = ~begun
            visible[:, :, in_prefix:, end - half : end] = begun
            visible[:, :, half:in_prefix, change.first : end - half] = False
        if change.bidirectional and in_prefix:
            everything = torch.ones_like(visible[:, :, :1])
            if attention_mask is not None:
                everything &= attention_mask[:, None, None, kv_offset : kv_offset + kv_length].bool()
            visible[:, :, :in_prefix] = everything
    additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    additive = additive.masked_fill(~visible, torch.finfo(dtype).min)
    if change.bias is None:
        return additive
    after = kv_length - change.first - change.prefix
    bias = change.bias.to(dtype).clamp(min=torch.finfo(dtype).min)
    return additive + torch.nn.functional.pad(bias, (change.first, after))
