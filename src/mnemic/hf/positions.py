"""The positions that a base model gives its tokens, for when something stands before them."""

from __future__ import annotations

from typing import Any

import torch

from mnemic.errors import UnsupportedModel
from mnemic.hf.anatomy import Places

_COUNT_REAL_TOKENS = ("opt", "mnemic-decoder", "mnemic-encoder-decoder")


def sequence_positions(
    places: Places, kwargs: dict[str, Any], starts: torch.Tensor | None, batch: int, length: int, past: int, device: Any
) -> torch.Tensor | None:
    """The positions (batch, length) that the base would give the sequence; they restart where documents start.

    None where the architecture has no position_ids.
    """
    if starts is not None and not separates_documents(places):
        causal = places.anatomy.kind == "causal"
        why = "places tokens by where they stand in the input" if causal else "is not causal"
        raise UnsupportedModel(
            f"{type(places.stack).__name__} {why}, so documents in one row cannot be kept apart: "
            "give each document a row of its own and no document_starts"
        )
    if not places.positions_by_id:
        return None
    if (given := kwargs.get("position_ids")) is not None:
        return given.expand(batch, -1) if given.ndim == 2 else given.expand(batch, length)
    counted = torch.arange(past, past + length, device=device).expand(batch, -1)
    config: Any = places.stack.config
    mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
    if real_only := mask is not None and config.model_type in _COUNT_REAL_TOKENS:
        mask = mask.long()
        counted = (mask.cumsum(1) * mask - 1)[:, past:]
    elif mask is not None and places.anatomy.positions == "rotary":  # padding on the left would come in between
        counted = counted - (mask.cumsum(1) == 0).sum(1, keepdim=True)
    if starts is not None:
        first = torch.where(starts, counted, torch.zeros_like(counted)).cummax(1).values
        return torch.where(counted < 0, counted, counted - first)
    if real_only:
        return counted
    if config.model_type == "roberta":
        real = ids.ne(config.pad_token_id) if ids is not None else torch.ones_like(counted)
        return (real.cumsum(1) + past) * real + config.pad_token_id
    return counted


def prefix_positions(places: Places, count: int, device: torch.device) -> torch.Tensor:
    """The positions of what stands before the sequence: -m ... -1, or the first of an absolute table."""
    if places.anatomy.positions != "absolute":
        return torch.arange(-count, 0, device=device)
    config: Any = places.stack.config
    first = config.pad_token_id + 1 if config.model_type == "roberta" else 0  # RoBERTa counts from behind padding
    return torch.full((count,), first, device=device)


def suffix_positions(places: Places, positions: torch.Tensor, real: torch.Tensor, count: int) -> torch.Tensor:
    """The positions (B, count) of what stands behind a sequence: on from its last real token, or that of an absolute
    table, whose room is not used."""
    last = (real.long() * torch.arange(real.shape[1], device=real.device)).argmax(1, keepdim=True)
    ended = positions.expand(len(real), -1).gather(1, last)
    if places.anatomy.positions == "absolute":
        return ended.expand(-1, count)
    return ended + torch.arange(1, count + 1, device=positions.device)


def separates_documents(places: Places) -> bool:
    """Whether several documents in one row can be kept apart exactly."""
    return places.anatomy.kind == "causal" and places.positions_by_id


def positions(model: Any) -> int | None:
    """How many tokens a model has positions for; None if there is no end to them."""
    most: int | None = getattr(model.config, "max_position_embeddings", None)
    return None if most is None else most - _reserved_positions(model)


def _reserved_positions(model: Any) -> int:
    """How many of its positions a model gives to no token: those up to the padding's, in models like RoBERTa."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return max((1 + index for table in tables if (index := getattr(table, "padding_idx", None)) is not None), default=0)
