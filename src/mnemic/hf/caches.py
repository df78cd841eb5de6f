"""KV caches of models with sliding windows: the prefix stays when the window moves on."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from mnemic.errors import UsageError


class PinnedSlidingLayer(DynamicSlidingWindowLayer):
    """A sliding window of keys and values whose first `pinned` entries are kept for ever."""

    def __init__(self, sliding_window: int, pinned: int) -> None:
        super().__init__(sliding_window)
        self.pinned = pinned

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Adds new entries and returns all that may be seen, the pinned ones first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        keys = torch.cat([self.keys, key_states], dim=-2)  # type: ignore[list-item]
        values = torch.cat([self.values, value_states], dim=-2)  # type: ignore[list-item]
        self.keys, self.values = self._kept(keys), self._kept(values)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys there will be, and the number of the first one, were the pinned ones where they seem to be."""
        kept = min(self.cumulative_length, self.pinned + self.sliding_window - 1)
        return kept + query_length, self.cumulative_length - kept

    def _kept(self, states: torch.Tensor) -> torch.Tensor:
        window = self.sliding_window - 1
        if states.shape[-2] <= self.pinned + window:
            return states
        return torch.cat([states[:, :, : self.pinned], states[:, :, -window:]], dim=-2)


def pin(cache: Cache, count: int) -> None:
    """Makes the sliding layers of an empty cache keep their first `count` entries."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.record_past:
                raise UsageError(
                    "assisted and prompt-lookup decoding do not go with memory tokens in a model with sliding windows: "
                    "generate without them"
                )
            cache.layers[index] = PinnedSlidingLayer(layer.sliding_window, count)
