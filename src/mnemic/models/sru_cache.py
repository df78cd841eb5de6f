"""What SRU++ carries from segment to segment: each layer's recurrent state, and the keys and values it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mnemic.errors import UsageError
from mnemic.models.cache import Segment, XLCache
from mnemic.models.layout import Layout
from mnemic.models.masks import PADDING


class SRUCache(XLCache):
    """An XL cache that also has the recurrent state (B, hidden_size) of each layer, without gradient.

    A state goes on through padding unchanged, and from 0 where a document starts. Memory tokens (the first `prefix`
    inputs of a forward) are attended to, but have a recurrence of their own: they leave no trace in the state. Those
    behind the text (the last `suffix`) go on in its recurrence, and the state is kept as it was before them.
    """

    def __init__(self, layers: int, limit: int, batch_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layers, limit, batch_size, device)
        self.states: list[Tensor | None] = [None] * layers

    @property
    def columns(self) -> list[Any]:
        """What each layer of the model has stored; a memory may keep what it read as one layer more."""
        return self.layers[: len(self.states)]

    def begin(  # type: ignore[override]
        self,
        shape: tuple[int, int],
        attention_mask: Tensor | None = None,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> SRUSegment:
        """Takes in the marks of the next segment, of `shape` (B, T), and returns what its layers read and write."""
        segment = super().begin(shape, attention_mask, document_starts, position_ids)
        return SRUSegment(self, segment, document_starts)

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Forgets everything, or only what the given rows saw."""
        super().reset(rows)
        if rows is None:
            self.states = [None] * len(self.states)
            return
        chosen = torch.as_tensor(rows, device=self.positions.device)
        self.states = [None if state is None else state.index_fill(0, chosen, 0.0) for state in self.states]

    def tensors(self) -> dict[str, Tensor]:
        """All that the cache knows, to be saved; `load_tensors` puts it back exactly."""
        states = {f"states.{index}": state.clone() for index, state in enumerate(self.states) if state is not None}
        return super().tensors() | states

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        names = [f"states.{index}" for index in range(len(self.states))]
        seen = "seen" in tensors and int(tensors["seen"]) > 0
        if seen and (missing := [name for name in names if name not in tensors]):
            raise UsageError(f"these tensors are no cache of SRU++: missing {', '.join(missing)}")
        super().load_tensors(tensors)
        device = self.positions.device
        self.states = [tensors[name].to(device, copy=True) if seen else None for name in names]

    def _select(self, rows: Tensor) -> None:
        super()._select(rows)
        self.states = [None if state is None else state.index_select(0, rows.to(state.device)) for state in self.states]


class SRUSegment:
    """One forward's hold on the cache: layers read what was there before it, and write once."""

    def __init__(self, cache: SRUCache, segment: Segment, document_starts: Tensor | None) -> None:
        self.layout: Layout = segment.layout
        self._cache = cache
        self._attention = segment
        self._before = list(cache.states)
        self._written: set[int] = set()
        self.padding, self.starts = self._marks(document_starts)

    def _marks(self, document_starts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Which of the new tokens are padding and which start a document, (B, T); None where none does."""
        length, prefix = self.layout.positions.shape[1], self.layout.prefix
        documents: Any = self.layout.documents
        padding = documents[:, -length:] == PADDING
        starts = None
        if document_starts is not None:
            starts = (document_starts.bool() & ~padding)[:, prefix:]
        padding = padding[:, prefix:]
        return (padding if padding.any() else None), (starts if starts is not None and starts.any() else None)

    def prefix_starts(self) -> Tensor | None:
        """Where a second group of memory tokens begins, (B, prefix), after which positions rise anew; None if none."""
        again = self.layout.positions[:, : self.layout.prefix].diff(dim=1) < 0
        starts = torch.nn.functional.pad(again, (1, 0))
        return starts.expand(len(self._cache.positions), -1) if again.any() else None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The cached and the new keys and values of a layer."""
        return self._attention.update(keys, values, layer_idx)

    def state(self, layer_idx: int, like: Tensor) -> Tensor:
        """A layer's state before this segment (B, d); `like` (B, T, d) gives the shape and kind of a first one."""
        state = self._before[layer_idx]
        return like.new_zeros(like.shape[0], like.shape[2]) if state is None else state.to(like)

    def keep(self, layer_idx: int, state: Tensor) -> None:
        """Keeps a layer's state after this segment for the next one."""
        if layer_idx not in self._written:
            self._written.add(layer_idx)
            self._cache.states[layer_idx] = state.detach().clone()
