"""The working memory: the pairs of each row's document that have left the context, first in, first out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mnemic.errors import UsageError
from mnemic.memories.attention.search import MISSING, Keys, new_ring, read, take, write


@dataclass(frozen=True)
class Found:
    """What was found for queries (H, T) of a row: pairs (H, T, k, d), and which number each has in the row's document.

    -1 stands for none, and numbers below it for pairs that are not of the document. Rows are not put together: what
    they found is the largest thing that a forward holds, and large blocks of memory are dear to come by.
    """

    keys: Tensor
    values: Tensor
    numbers: Tensor

    @property
    def there(self) -> Tensor:
        """Which pairs were found, (H, T, k)."""
        return self.numbers != MISSING

    @classmethod
    def best(cls, parts: list[Found], queries: Tensor, k: int) -> Found:
        """Of what several memories found, the k pairs nearest to each query (H, T, d)."""
        if len(parts) == 1:
            return parts[0]
        keys, values, numbers = (
            torch.cat([getattr(p, name) for p in parts], 2) for name in ("keys", "values", "numbers")
        )
        scores = (queries.unsqueeze(2) @ keys.transpose(2, 3)).squeeze(2).masked_fill(numbers == MISSING, -torch.inf)
        chosen = scores.topk(k, 2).indices
        wide = chosen.unsqueeze(3).expand(-1, -1, -1, keys.shape[3])
        return cls(keys.gather(2, wide), values.gather(2, wide), numbers.gather(2, chosen))

    def elsewhere(self) -> Found:
        """The same with numbers that say that the pairs are of another text."""
        numbers = torch.where(self.there, MISSING - 1 - self.numbers, MISSING)
        return Found(self.keys, self.values, numbers)

    def hidden(self, hidden: Tensor) -> Found:
        """Without what was found for some of the queries, (T,)."""
        return Found(self.keys, self.values, self.numbers.masked_fill(hidden[:, None], MISSING))


class Row:
    """The memory of one row and layer: the last `size` pairs before the last `held` ones, which the context holds."""

    def __init__(self, size: int, values: Tensor, keys: Keys) -> None:
        self.size = size
        self.values = values  # (H, capacity, d), a ring; the capacity beyond `size` is for what the context holds
        self.keys = keys
        self.count = 0
        self.before = 0  # pairs of the document that came before number 0, if the memory was loaded
        self.first = 0  # the number of the oldest pair that is still there
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Takes in the next pairs, (H, n, d) each."""
        if self.values.dtype == torch.float16:  # in which large numbers would be infinite
            most = torch.finfo(torch.float16).max
            keys, values = keys.clamp(-most, most), values.clamp(-most, most)
        with self._lock:
            self._make_room(keys.shape[1])
            write(self.values, values, self.count)
            self.keys.add(keys)
            self.count += keys.shape[1]

    def load(self, keys: Tensor, values: Tensor, before: int) -> None:
        """Holds these pairs and no others, which a memory of this size had when it was saved."""
        self.clear()
        self._make_room(keys.shape[1] - self.size)
        write(self.values, values, 0)
        self.keys.add(keys)
        self.count, self.before = keys.shape[1], before

    def _make_room(self, new: int) -> None:
        """Makes the ring so large that none of its `size` pairs goes while the context holds all the new ones."""
        capacity = self.values.shape[1]
        if self.size + new <= capacity:
            return
        first = max(self.count - capacity, 0)
        kept, values = read(self.values, first, self.count), self.values
        self.values = new_ring(values.shape[0], self.size + new, values.shape[2], values.dtype, values.device)
        write(self.values, kept, first)
        self.keys.make_room(self.size + new)

    def clear(self) -> None:
        """Forgets everything."""
        self.keys.clear()
        self.count = self.before = self.first = 0

    def visible(self, held: int) -> tuple[int, int]:
        """The numbers of the pairs that can be found, while the last `held` pairs are in the context."""
        end = max(self.count - held, self.first)
        first = max(end - self.size, self.count - self.values.shape[1], self.first)
        return min(first, end), end

    def find(self, queries: Tensor, k: int, held: int) -> Found:
        """The k pairs nearest to each of the queries (H, T, d)."""
        with self._lock:  # what several threads look into may be put in lists by the first
            first, end = self.visible(held)
            self.first = first
            self.keys.forget(first)
            numbers, keys = self.keys.search(queries, k, first, end)
        slots = numbers.clamp(min=0) % self.values.shape[1]
        if self.before:
            numbers = torch.where(numbers == MISSING, MISSING, numbers + self.before)
        return Found(keys, take(self.values, slots, queries.dtype), numbers)

    def visible_pairs(self, held: int) -> tuple[Tensor, Tensor]:
        """All pairs that can be found, (H, n, d) each."""
        with self._lock:
            first, end = self.visible(held)
            return self.keys.all(first)[:, : end - first], read(self.values, first, end)

    @property
    def oldest(self) -> int:
        """The number of the oldest pair that may be found now or later."""
        return max(self.count - self.values.shape[1], self.first)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs that may be found now or later, in order: (H, n, d) each."""
        return self.keys.all(self.oldest), read(self.values, self.oldest, self.count)

    def copy(self) -> Row:
        """The same memory once more."""
        twin = Row(self.size, self.values.clone(), self.keys.copy())
        twin.count, twin.before, twin.first = self.count, self.before, self.first
        return twin


class WorkingMemory:
    """The memories of all rows of a batch, for one layer."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def append(self, keys: Tensor, values: Tensor, kept: Tensor) -> None:
        """Takes in those of the next pairs (B, H, T, d) that are `kept` (B, T); without gradient."""
        keys, values = keys.detach(), values.detach()
        for row, own, one_keys, one_values in zip(self.rows, kept, keys, values, strict=True):
            if own.all():
                row.append(one_keys, one_values)
            elif own.any():
                row.append(one_keys[:, own], one_values[:, own])

    def clear(self, rows: Tensor) -> None:
        """Forgets what the rows marked in (B,) read."""
        for row, cleared in zip(self.rows, rows.tolist(), strict=True):
            if cleared:
                row.clear()

    def has_visible(self, held: list[int] | None) -> bool:
        """Whether any row has a pair to be found, while the last `held` pairs of each are in the context."""
        seen = [row.visible(h) for row, h in zip(self.rows, held or [0] * len(self.rows), strict=True)]
        return any(first < end for first, end in seen)

    def find(self, queries: Tensor, k: int, held: list[int] | None) -> list[Found]:
        """For each row the pairs nearest to its queries (B, H, T, d), its last `held` pairs left out."""
        found = []
        for number, one in enumerate(queries):
            row, kept = self._serving(number, len(queries), held)
            found.append(row.find(one, k, kept))
        return found

    def visible_pairs(self, number: int, batch: int, held: list[int] | None) -> tuple[Tensor, Tensor]:
        """All pairs that row `number` of a batch may find, (H, n, d) each."""
        row, kept = self._serving(number, batch, held)
        return row.visible_pairs(kept)

    def _serving(self, number: int, batch: int, held: list[int] | None) -> tuple[Row, int]:
        """The row that row `number` of a batch looks into: its own, or one that it shares."""
        if batch % len(self.rows):
            raise UsageError(
                f"the attention memory has read {len(self.rows)} texts and the batch has {batch} rows: read one text "
                "for all rows, or one for each"
            )
        index = number // (batch // len(self.rows))
        return self.rows[index], held[index] if held is not None else 0

    def select(self, rows: Sequence[int]) -> None:
        """Makes the rows these, some of which may be the same."""
        taken: set[int] = set()
        chosen = []
        for row in rows:
            chosen.append(self.rows[row].copy() if row in taken else self.rows[row])
            taken.add(row)
        self.rows = chosen

    def tensors(self) -> dict[str, Tensor]:
        """All pairs, a row for each row, the shorter ones filled up; and how many each row has."""
        pairs = [row.pairs() for row in self.rows]
        lengths = [keys.shape[1] for keys, _ in pairs]
        before = [row.before + row.count - length for row, length in zip(self.rows, lengths, strict=True)]
        found = {"lengths": torch.tensor(lengths), "before": torch.tensor(before)}
        for name, side in zip(("keys", "values"), zip(*pairs, strict=True), strict=True):
            found[name] = pad_sequence([one.transpose(0, 1) for one in side], batch_first=True).transpose(1, 2)
        learned = [row.keys.learned(row.oldest) for row in self.rows]
        return found | {name: pad_sequence([one[name] for one in learned], batch_first=True) for name in learned[0]}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        lengths, before = tensors["lengths"].tolist(), tensors["before"].tolist()
        for number, row in enumerate(self.rows):
            keys, values = (tensors[name][number, :, : lengths[number]].to(row.values) for name in ("keys", "values"))
            row.load(keys, values, before[number])
            learned = row.keys.learned(0)
            if learned.keys() <= tensors.keys():  # or they were found in another way
                row.keys.load_learned({name: tensors[name][number] for name in learned})
