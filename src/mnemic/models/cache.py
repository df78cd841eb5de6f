"""The XL cache: keys and values of earlier segments, with each key's position and document (arXiv 1901.02860)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from mnemic.errors import UsageError
from mnemic.models.layout import Layout, place
from mnemic.models.masks import EVERY, PADDING, real_tokens

RIDER = "rider."  # before the names of what rides in a cache
_MARKS = ("positions", "documents", "next_position", "document")


def rows_to_generate(config: Any, inputs: dict[str, Any], rows: int) -> int:
    """How many rows an XL cache for `generate` must have; 0 if the caller has chosen another cache, or none."""
    if config.use_cache is False or config.cache_implementation or inputs.get("past_key_values") is not None:
        return 0
    return rows * max(config.num_beams or 1, config.num_return_sequences or 1)


class XLCache(Cache):
    """Keeps the last `limit` tokens of every row across segments of any length; pass it as `past_key_values`.

    Keys and values are stored without gradient. A row's tokens see cached tokens of their own document only, and
    their positions go on where the last segment stopped. Padding takes no room: in each row the invisible columns
    stand first and fall out first. The first `prefix` inputs of a forward and the last `suffix` (memory tokens) are
    neither stored nor counted; the prefix may be two `groups`, at the same positions.
    """

    prefix: int = 0
    suffix: int = 0
    groups: int = 1

    def __init__(self, layers: int, limit: int, batch_size: int, device: torch.device | str = "cpu") -> None:
        if limit < 1:
            raise UsageError(f"an XL cache of {limit} tokens: expected at least 1; set the model's xl_length")
        super().__init__(layers=[_Layer() for _ in range(layers)])
        self.limit = limit
        self.seen = 0
        self.positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        self.documents = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        self.next_position = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.document = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.segment: Segment | None = None
        self.riders: list[Any] = []  # what a memory keeps of the same tokens, as layers of a cache
        self.saved_riders: dict[str, Tensor] = {}  # the same, loaded, until a memory takes it up

    @property
    def columns(self) -> list[_Layer]:
        """What each layer of the model has stored."""
        return self.layers  # type: ignore[return-value]

    @property
    def length(self) -> int:
        """Number of columns stored now; the keys of the next forward are these and then its inputs."""
        return self.positions.shape[1]

    def begin(
        self,
        shape: tuple[int, int],
        attention_mask: Tensor | None = None,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Segment:
        """Takes in the marks of the next segment, of `shape` (B, T), and returns what its layers read and write."""
        batch, length = shape
        if batch != self.positions.shape[0]:
            raise UsageError(
                f"the XL cache has {self.positions.shape[0]} rows, the input {batch}: make a new cache with "
                f"new_cache({batch}), or repeat its rows with batch_repeat_interleave for beams"
            )
        prefix, suffix, new = self.prefix, self.suffix, length - self.prefix - self.suffix
        real = self.positions.new_ones(batch, new, dtype=torch.bool)
        if attention_mask is not None:
            real = real_tokens(attention_mask, length)[:, prefix : prefix + new].expand(batch, -1)
        starts = None if document_starts is None else document_starts[:, prefix : prefix + new]
        positions, documents = place(real, starts, self.next_position[:, None], self.document[:, None])
        group = torch.arange(-(prefix // self.groups), 0, device=positions.device)
        before = group.repeat(self.groups).expand(batch, -1)
        if position_ids is not None:
            positions = position_ids.expand(batch, -1)[:, prefix : prefix + new]
            before = position_ids.expand(batch, -1)[:, :prefix]
        earlier = self.positions, self.documents
        order = self._keep(positions, documents, real)
        after = self.next_position[:, None] + torch.arange(suffix, device=positions.device)
        queries = torch.cat([before, positions, after], dim=1)
        around = [torch.full_like(before, EVERY), documents, self.document[:, None].expand(-1, suffix)]
        layout = Layout(
            positions=queries,
            key_positions=torch.cat([earlier[0], queries], dim=1),
            documents=torch.cat([earlier[1], *around], dim=1),
            prefix=prefix,
            suffix=suffix,
        )
        self.segment = Segment(self, layout, order)
        return self.segment

    def _keep(self, positions: Tensor, documents: Tensor, real: Tensor) -> Tensor | None:
        """Adds the new tokens' marks; the order in which columns are kept, or None where it does not change."""
        last = torch.where(real, torch.arange(real.shape[1], device=real.device), -1).amax(1, keepdim=True)
        followed = positions.gather(1, last.clamp(min=0)).squeeze(1) + 1
        self.next_position = torch.where(last.squeeze(1) >= 0, followed, self.next_position)
        self.document = torch.maximum(self.document, documents.amax(1))
        self.seen += real.shape[1]
        positions, documents = torch.cat([self.positions, positions], 1), torch.cat([self.documents, documents], 1)
        order = None
        if not bool(real.all()):
            order = torch.argsort((documents != PADDING).int(), dim=1, stable=True)
            positions, documents = positions.gather(1, order), documents.gather(1, order)
        self.positions, self.documents = positions[:, -self.limit :], documents[:, -self.limit :]
        return order

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The cached and the new keys and values of a layer; the last ones are kept for the next segment."""
        if self.segment is None:
            raise UsageError("an XL cache works with mnemic's decoder only; give other models their own cache")
        return self.segment.update(key_states, value_states, layer_idx)

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Forgets everything, or only what the given rows saw."""
        if rows is None:
            super().reset()
            self.seen, self.riders, self.saved_riders = 0, [], {}
            self.positions, self.documents = self.positions[:, :0], self.documents[:, :0]
            self.next_position, self.document = torch.zeros_like(self.next_position), torch.zeros_like(self.document)
            return
        chosen = torch.as_tensor(rows, device=self.positions.device)
        self.documents = self.documents.clone()
        self.next_position = self.next_position.clone()
        self.documents[chosen] = PADDING
        self.next_position[chosen] = 0
        for rider in self.riders:
            rider.forget(chosen)

    def tensors(self) -> dict[str, Tensor]:
        """All that the cache knows, to be saved; `load_tensors` puts it back exactly."""
        found = {name: getattr(self, name).clone() for name in _MARKS}
        found["seen"] = torch.tensor(self.seen)
        for index, layer in enumerate(self.columns):
            if (stored := layer.stored()) is not None:
                found[f"keys.{index}"], found[f"values.{index}"] = (states.clone() for states in stored)
        for rider in self.riders:
            found |= {RIDER + name: tensor for name, tensor in rider.tensors().items()}
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        kept = tensors["positions"].shape[1] if "positions" in tensors else 0
        names = {*_MARKS, "seen"}
        if kept:
            names |= {f"{kind}.{index}" for kind in ("keys", "values") for index in range(len(self.layers))}
        if names - set(tensors) or kept > self.limit:
            raise UsageError(
                f"these tensors are no XL cache of {len(self.layers)} layers and at most {self.limit} tokens: "
                f"{'missing ' + ', '.join(sorted(names - set(tensors))) if names - set(tensors) else f'{kept} tokens'}"
            )
        device = self.positions.device
        for name in _MARKS:
            setattr(self, name, tensors[name].to(device, copy=True))
        self.seen, self.riders = int(tensors["seen"]), []
        self.saved_riders = {name.removeprefix(RIDER): t for name, t in tensors.items() if name.startswith(RIDER)}
        for index, layer in enumerate(self.columns):
            layer.reset()
            if kept:
                layer.store(
                    tensors[f"keys.{index}"].to(device, copy=True), tensors[f"values.{index}"].to(device, copy=True)
                )

    def _select(self, rows: Tensor) -> None:
        for name in _MARKS:
            marks = getattr(self, name)
            setattr(self, name, marks.index_select(0, rows.to(marks.device)))
        for rider in self.riders:
            rider.reorder_cache(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i a copy of row `beam_idx[i]`, as beam search asks."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the given rows."""
        super().batch_select_indices(indices)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row, as for the beams of a prompt."""
        super().batch_repeat_interleave(repeats)
        rows = torch.arange(self.positions.shape[0], device=self.positions.device)
        self._select(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what fell out of the cache cannot come back."""
        raise UsageError("an XL cache cannot be cropped: generate with a DynamicCache instead")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens seen since the last reset, stored or not."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum: old tokens make room for new ones."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys of the next forward and the index of the first."""
        return self.length + query_length, self.seen - self.length

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.positions.shape[0]


class Segment:
    """One forward's hold on the cache: layers read what was cached before it, and write once.

    Activation checkpointing runs a layer again in the backward pass, when the cache has moved on: the layer must read
    the same keys as the first time and must not write again.
    """

    def __init__(self, cache: XLCache, layout: Layout, order: Tensor | None) -> None:
        self.layout = layout
        self._cache = cache
        self._order = order
        self._past = [layer.stored() for layer in cache.columns]
        self._written: set[int] = set()

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The cached and the new keys and values of a layer."""
        past, cache = self._past[layer_idx], self._cache
        if layer_idx not in self._written:
            self._written.add(layer_idx)
            kept = (self._kept(new, past and past[side]) for side, new in enumerate((keys, values)))
            cache.columns[layer_idx].store(*kept)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        return keys, values

    def _kept(self, new: Tensor, past: Tensor | None) -> Tensor:
        """The columns that stay: the last `limit`, padding moved out of their way."""
        limit = self._cache.limit
        new = new.detach()[:, :, self.layout.prefix : new.shape[2] - self.layout.suffix]
        if self._order is None and new.shape[2] >= limit:
            return new[:, :, -limit:].clone()
        columns = new if past is None else torch.cat([past, new], dim=2)
        if self._order is not None:
            index = self._order[:, -limit:].view(columns.shape[0], 1, -1, 1)
            return columns.gather(2, index.expand(-1, columns.shape[1], -1, columns.shape[3]))
        return columns[:, :, -limit:].clone()


class _Layer(DynamicLayer):
    """Keys and values of one layer, (B, heads, columns, head width)."""

    is_croppable = False

    def stored(self) -> tuple[Tensor, Tensor] | None:
        """The stored keys and values, if there are any."""
        return None if self.keys is None or self.values is None else (self.keys, self.values)

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Replaces the stored tensors; whoever still holds the old ones sees no change."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.is_initialized = keys, values, True
