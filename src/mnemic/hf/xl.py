"""The XL cache in models of transformers with rotary positions: keys and values of the last tokens, across segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from mnemic.errors import UnsupportedModel
from mnemic.hf.anatomy import Places
from mnemic.models.cache import Segment, XLCache


class OpenSegment(Cache):
    """What a stack of transformers sees of an XL cache for the time of one forward: an ordinary cache."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(layers=[])
        self.segment = segment

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The cached and the new keys and values of a layer."""
        return self.segment.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many keys come before the new ones."""
        return self.segment.layout.cached

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys there are, and the number of the first."""
        return self.segment.layout.cached + query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are the masks' affair, not the cache's."""
        return [False]

    @property
    def is_compileable(self) -> bool:
        """The number of keys changes."""
        return False


def new_xl_cache(places: Places, length: int, rows: int) -> XLCache:
    """An empty XL cache of `length` tokens; UnsupportedModel if positions cannot go on from segment to segment."""
    if places.anatomy.kind != "causal" or places.anatomy.positions != "rotary":
        raise UnsupportedModel(
            f"{type(places.stack).__name__} cannot have an XL cache: it takes a causal model with rotary positions, "
            "which go on from segment to segment; leave xl_length at 0, the memory works without"
        )
    return XLCache(len(places.blocks), length, rows, next(places.stack.parameters()).device)


def open_segment(cache: XLCache, kwargs: dict[str, Any], starts: Tensor | None) -> Tensor:
    """Puts an XL cache into the inputs of a stack; the documents (B, K) of the keys, by which they are kept apart."""
    inputs = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    batch, length = inputs.shape[:2]
    segment = cache.begin((batch, length), kwargs.get("attention_mask"), starts, kwargs.get("position_ids"))
    layout = segment.layout
    kwargs["past_key_values"] = OpenSegment(segment)
    kwargs["position_ids"] = layout.positions.clamp(min=0)
    kwargs["attention_mask"] = torch.ones(batch, layout.key_positions.shape[1], dtype=torch.long, device=inputs.device)
    kwargs["use_cache"] = True
    return layout.documents if layout.documents is not None else torch.zeros_like(layout.key_positions)
