"""What an output memory keeps of a text that is read piece by piece: the long-term memory, in training the segment
before, and the local one of a text that is being generated, which rides in the KV cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from mnemic.memories.output.layer import NOTHING, Mass, Past, comparable, mass, masses

_TENSORS = ("keys", "values", "documents", "positions", "document", "position")


class LongTerm:
    """The last `size` tokens of each row's document before what is being read now: keys, values, and where they stood.

    Rows read documents one after the other, each piece either new or beginning with tokens that were read before, as
    context. Those are in the piece itself and not in the memory, so that no token counts twice.
    """

    def __init__(self, size: int, rows: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.keys = torch.zeros(rows, 0, 0, device=device)
        self.values, self.documents, self.positions = (
            torch.zeros(rows, 0, dtype=torch.long, device=device) for _ in range(3)
        )
        self.document, self.position = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))

    def masses(
        self,
        queries: Tensor,
        targets: Tensor,
        labels: Tensor,
        overlap: Tensor,
        similarity: str,
        temperatures: tuple[float, ...],
        sizes: tuple[int, ...],
    ) -> Mass:
        """The memory's mass for contexts (B, T, d) of the next piece, the first `overlap` (B,) of which are context.

        For each temperature and each of the rising sizes, that many last tokens: (temperatures, sizes, B, T).
        """
        queries, keys = comparable(queries, self.keys.to(queries.dtype), similarity)
        age = (self.position - overlap)[:, None] - self.positions  # 1 is the token just before the piece
        seen = (age > 0) & (age <= sizes[-1])
        rings = torch.searchsorted(torch.tensor(sizes, device=age.device), age)
        sight = Past(labels, self.documents.where(seen, -1))
        found = masses(queries, keys, targets, self.values, sight, temperatures, rings, len(sizes))
        return Mass(found.all.logcumsumexp(1), found.target.logcumsumexp(1))

    def append(self, keys: Tensor, values: Tensor, labels: Tensor, new: Tensor) -> None:
        """Takes in the tokens of a piece that are `new` (B, T); without gradient."""
        kept = new & (labels == labels[:, -1:])  # what belongs to an earlier document is not needed any more
        before = torch.where(labels[:, -1] == self.document, self.position, 0)
        positions = before[:, None] + kept.long().cumsum(1) - 1
        keys, length, some = keys.detach(), keys.shape[1], kept.any(0)
        new_values, new_labels = values.masked_fill(~kept, NOTHING), labels.masked_fill(~kept, -1)
        self.keys = torch.cat([self.keys, keys[:, some]], 1) if self.keys.shape[1] else keys[:, some]
        self.values = torch.cat([self.values, new_values[:, some]], 1)
        self.documents = torch.cat([self.documents, new_labels[:, some]], 1)
        self.positions = torch.cat([self.positions, positions[:, some]], 1)
        self.document, self.position = labels[:, -1].clone(), before + kept.sum(1)
        self._trim(length)

    def _trim(self, piece: int) -> None:
        """Lets go of the first columns, if nothing in them can be seen again."""
        oldest = (self.position - self.size - piece)[:, None]
        needed = ((self.documents == self.document[:, None]) & (self.positions >= oldest)).any(0)
        first = int(needed.long().argmax()) if needed.any() else needed.shape[0]
        for name in ("keys", "values", "documents", "positions"):
            setattr(self, name, getattr(self, name)[:, first:])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows."""
        for name in _TENSORS:
            setattr(self, name, getattr(self, name)[indices])

    def tensors(self) -> dict[str, Tensor]:
        """All that it holds, a row for each row of the batch."""
        return {name: getattr(self, name) for name in _TENSORS}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Goes on from where `tensors` were taken."""
        for name in _TENSORS:
            setattr(self, name, tensors[name].to(getattr(self, name).device))


class Previous:
    """The segment before in each row, as it was when it was read: a memory of training that gets no gradient."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self.keys = torch.zeros(rows, 0, 0, device=device)
        self.values, self.documents = (torch.zeros(rows, 0, dtype=torch.long, device=device) for _ in range(2))

    def mass(self, queries: Tensor, targets: Tensor, documents: Tensor, similarity: str) -> Mass:
        """Its mass for the contexts (B, T, d) of the next segment, whose document 0 goes on from the one before."""
        queries, keys = comparable(queries, self.keys.to(queries.dtype), similarity)
        return mass(queries, keys, targets, self.values, Past(documents, self.documents))

    def replace(self, keys: Tensor, values: Tensor, documents: Tensor) -> None:
        """Takes in a segment in place of the one that it holds."""
        self.keys, self.values, self.documents = keys.detach(), values, documents - documents[:, -1:]

    def tensors(self) -> dict[str, Tensor]:
        """All that it holds, a row for each row of the batch."""
        return {"keys": self.keys, "values": self.values, "documents": self.documents}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Goes on from where `tensors` were taken."""
        self.keys, self.values, self.documents = (tensors[name].to(self.keys.device) for name in self.tensors())


class Riding(DynamicLayer):
    """Keys (B, 1, N, d) and (value, document) (B, 1, N, 2) of the tokens of a KV cache, as one more layer of it.

    So it follows the cache: reordered with its beams, repeated, cropped and selected.
    """

    @classmethod
    def of(cls, cache: Any) -> Riding | None:
        """The one that rides in a cache, if any."""
        return next((layer for layer in _seats(cache) if isinstance(layer, cls)), None)

    @classmethod
    def join(cls, cache: Any) -> Riding | None:
        """The one that rides in a filled cache, put there if there is none; None if there is no cache."""
        if cache is None:
            return None
        found = cls.of(cache)
        if found is None:
            found = cls()
            _seats(cache).append(found)
        return found

    def past(self, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys (B, N, d), values and documents (B, N) so far, now that the `first` (B,) new tokens are known."""
        values, documents = self.values[:, 0, :, 0].clone(), self.values[:, 0, :, 1]  # type: ignore[index]
        values[:, -1] = torch.where(values[:, -1] == NOTHING, NOTHING, first)
        self.values[:, 0, :, 0] = values  # type: ignore[index]
        return self.keys[:, 0], values, documents  # type: ignore[index]

    def keep(self, keys: Tensor, values: Tensor, documents: Tensor) -> None:
        """Adds new tokens."""
        self.update(keys.detach()[:, None], torch.stack([values, documents], -1)[:, None])

    def forget(self, rows: Tensor) -> None:
        """Lets nothing be found any more of what these rows hold."""
        self.values[rows, ..., 0] = NOTHING  # type: ignore[index]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty tensors, of the right type each."""
        super().lazy_initialization(key_states, value_states)
        self.values = value_states[..., :0, :]


def _seats(cache: Any) -> list[Any]:
    """The layers of a cache: an encoder-decoder's own tokens', or what rides in our XL cache."""
    cache = getattr(cache, "self_attention_cache", cache)
    return getattr(cache, "riders", getattr(cache, "layers", []))
