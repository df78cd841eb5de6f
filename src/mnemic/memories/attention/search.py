"""Where the keys of one row's memory are, and how those nearest to a query are found: exactly, or by lists.

Keys are numbered in the order in which they came, from 0 at the document's start. A search is for the numbers `first`
to `end`; a number that is not found is -1.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import faiss
import torch
from torch import Tensor

from mnemic.memories.attention.quantiser import Quantiser, exactly_listed, listed_keys

MISSING = -1
GROUP = 16  # scores of which first only the highest is looked at
SCORES = 1 << 21  # that are held at a time
PENDING = 512  # keys that wait to be listed, and so many old ones to be taken out of their lists


class Keys(Protocol):
    """The keys of one row, (H, n, d): added at the end, forgotten from the start."""

    def add(self, keys: Tensor) -> None:
        """Takes in the next keys, (H, n, d)."""

    def forget(self, first: int) -> None:
        """Lets go of the keys before number `first`."""

    def clear(self) -> None:
        """Lets go of all keys, and counts from 0 again."""

    def search(self, queries: Tensor, k: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The numbers (H, T, k) of the keys with the highest inner product with queries (H, T, d), and those keys."""

    def all(self, first: int) -> Tensor:
        """The keys from number `first` on, in order."""

    def copy(self) -> Self:
        """The same keys once more."""

    def learned(self) -> dict[str, Tensor]:
        """What the search learned from the keys, to be saved beside them."""

    def load_learned(self, learned: dict[str, Tensor]) -> None:
        """Goes on with what was learned from the keys, which have been added."""


class ExactKeys:
    """Keys in a ring, all of which are compared with each query; in blocks, never in one large table of scores."""

    def __init__(self, heads: int, width: int, capacity: int, dtype: torch.dtype, device: Any) -> None:
        self.capacity = capacity
        self.end = 0
        self.ring = torch.empty(heads, capacity, width, dtype=dtype, device=device)  # pages are taken when written

    def add(self, keys: Tensor) -> None:
        """Takes in the next keys; the oldest are overwritten."""
        write(self.ring, keys, self.end)
        self.end += keys.shape[1]

    def forget(self, first: int) -> None:
        """Nothing to do: what is old is overwritten, and searches say where they begin."""

    def clear(self) -> None:
        """Counts from 0 again."""
        self.end = 0

    def search(self, queries: Tensor, k: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The numbers and the keys with the highest inner products."""
        parts = [self.ring[:, a:b] for a, b in _stretches(first, end, self.capacity)]
        numbers = torch.full((*queries.shape[:2], k), MISSING, device=queries.device)
        for head, query in enumerate(queries):
            found = nearest(query, [part[head].to(query.dtype) for part in parts], k)
            numbers[head, :, : found.shape[1]] = found + first
        slots = numbers.clamp(min=first) % self.capacity if end > first else torch.zeros_like(numbers)
        return numbers, take(self.ring, slots, queries.dtype)

    def all(self, first: int) -> Tensor:
        """The keys from number `first` on, in order."""
        return read(self.ring, first, self.end)

    def copy(self) -> Self:
        """The same keys once more."""
        twin = type(self)(self.ring.shape[0], self.ring.shape[2], self.capacity, self.ring.dtype, self.ring.device)
        twin.ring.copy_(self.ring)
        twin.end = self.end
        return twin

    def learned(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_learned(self, learned: dict[str, Tensor]) -> None:
        """Nothing to do."""


class ListedKeys:
    """Keys in lists around points of a quantiser; a query looks into the lists of the points nearest to it.

    The quantiser is the row's own and stays when the row begins another document.
    The newest keys wait, and are compared one and all, until there are enough of them to be listed.
    """

    def __init__(self, quantiser: Quantiser, heads: int, width: int, dtype: torch.dtype) -> None:
        self.quantiser = quantiser
        self.shape, self.dtype = (heads, width), dtype
        self.clear()

    def clear(self) -> None:
        """Counts from 0 again; the quantiser stays."""
        heads, width = self.shape
        self.waiting = torch.empty(heads, 0, width, dtype=self.dtype)
        self.lists: list[Any] = []  # one FAISS index a head
        self.made_with = -1  # the generation of the quantiser
        self.first = self.removed = self.listed = 0  # all keys before these numbers are: forgotten, taken out, listed
        self.queries: Tensor | None = None  # the last ones asked, to measure recall by

    @property
    def end(self) -> int:
        """The number of the next key."""
        return self.listed + self.waiting.shape[1]

    def add(self, keys: Tensor) -> None:
        """Takes in the next keys."""
        self.waiting = torch.cat([self.waiting, keys.to(self.dtype)], 1)

    def forget(self, first: int) -> None:
        """Lets go of the keys before number `first`."""
        self.first = max(self.first, first)
        if self.lists and self.first - self.removed >= PENDING:
            self._remove()

    def _remove(self) -> None:
        self.removed = self.first
        for one in self.lists:
            one.remove_ids(faiss.IDSelectorRange(0, self.first))

    def search(self, queries: Tensor, k: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The numbers and the keys with the highest inner products, as far as the lists tell."""
        self.queries = queries[:, -64:].detach()
        self._list(end)
        begin = max(first - self.listed, 0)
        waiting = self.waiting[:, begin : end - self.listed].to(queries.dtype)
        numbers = torch.full((*queries.shape[:2], k), MISSING)
        keys = torch.zeros(*queries.shape[:2], k, queries.shape[2], dtype=queries.dtype)
        stale = min(self.first - self.removed, k)  # what may be found though it is forgotten
        for head, query in enumerate(queries):
            ids, vectors = self._listed(head, query, k + stale, first, end)
            found = nearest(query, [waiting[head]], k)
            if not ids.shape[1]:
                width = found.shape[1]
                numbers[head, :, :width], keys[head, :, :width] = found + self.listed + begin, waiting[head][found]
                continue
            if found.shape[1]:
                ids = torch.cat([ids, found + self.listed + begin], 1)
                vectors = torch.cat([vectors, waiting[head][found]], 1)
            if ids.shape[1] > k:
                scores = (vectors @ query.unsqueeze(2)).squeeze(2).masked_fill(ids == MISSING, -torch.inf)
                best = scores.topk(k, 1).indices
                ids = ids.gather(1, best)
                vectors = vectors.gather(1, best.unsqueeze(2).expand(-1, -1, vectors.shape[2]))
            numbers[head, :, : ids.shape[1]], keys[head, :, : ids.shape[1]] = ids, vectors
        return numbers, keys

    def _listed(self, head: int, query: Tensor, k: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The nearest of the keys that are listed; those that are not to be found are marked as missing."""
        if not self.lists:
            return torch.empty(len(query), 0, dtype=torch.long), query.new_empty(len(query), 0, query.shape[1])
        _, ids, vectors = self.lists[head].search_and_reconstruct(query.float().numpy(), k)
        if (ids < 0).any():
            vectors[ids < 0] = 0  # FAISS leaves no numbers there
        numbers = torch.from_numpy(ids)
        numbers.masked_fill_((numbers < first) | (numbers >= end), MISSING)
        return numbers, torch.from_numpy(vectors).to(query.dtype)

    def _list(self, end: int) -> None:
        """Lists the waiting keys before number `end`, if there are enough; with a new quantiser, all of them."""
        ready = end - self.listed
        if ready < PENDING:
            return
        held = end - max(self.first, self.removed if self.lists else 0)
        if self.quantiser.is_due(held):
            self.quantiser.learn(self.all(self.first)[:, : end - self.first], self.queries)
        if not self.quantiser.learned:
            return
        if self.made_with != self.quantiser.generation:
            keys = self.all(self.first)
            self._make(keys[:, : end - self.first], keys[:, end - self.first :], end)
            return
        numbers = range(self.listed, end)
        for head, one in enumerate(self.lists):
            self.quantiser.add(one, self.waiting[head, :ready], numbers)
        self.waiting, self.listed = self.waiting[:, ready:].clone(), end
        self.quantiser.written += ready

    def _make(self, keys: Tensor, waiting: Tensor, end: int) -> None:
        """Lists all keys anew."""
        self.lists = [self.quantiser.index(head, keys[head], self.dtype, self.first) for head in range(len(keys))]
        self.waiting, self.listed, self.removed = waiting.clone(), end, self.first
        self.made_with = self.quantiser.generation

    def all(self, first: int) -> Tensor:
        """The keys from number `first` on, in order."""
        listed = [listed_keys(one, first, self.listed) for one in self.lists]
        if not listed:
            return self.waiting[:, max(first - self.listed, 0) :]
        waiting = self.waiting[:, max(first - self.listed, 0) :]
        return torch.cat([torch.stack(listed).to(self.dtype), waiting], 1)

    def recall(self, k: int) -> float | None:
        """The share of the true nearest that the last queries find, or None if nothing is listed yet."""
        if not self.lists or self.queries is None:
            return None
        return exactly_listed(self.lists, self.queries, k, self.first, self.listed)

    def copy(self) -> Self:
        """The same keys once more."""
        quantiser = Quantiser(self.quantiser.size, self.quantiser.k, self.quantiser.wanted)
        twin = type(self)(quantiser, *self.shape, self.dtype)
        twin.first = twin.removed = twin.listed = self.first
        twin.add(self.all(self.first))
        twin.load_learned(self.learned())
        return twin

    def learned(self) -> dict[str, Tensor]:
        """The quantiser's points (lists, H, d), and how many of the keys are listed."""
        heads, width = self.shape
        own = self.quantiser
        points = [torch.from_numpy(one.reconstruct_n(0, one.ntotal)) for one in own.points]
        listed = self.listed - self.first if self.lists else 0
        return {
            "points": torch.stack(points, 1) if points else torch.empty(0, heads, width),
            "probes": torch.tensor(own.probes or [0] * heads),
            "learning": torch.tensor([len(points[0]) if points else 0, listed, own.learned_from, own.written]),
        }

    def load_learned(self, learned: dict[str, Tensor]) -> None:
        """Lists as many of the keys as were listed."""
        lists, listed, learned_from, written = learned["learning"].tolist()
        if lists:
            self.quantiser.load(learned["points"][:lists], learned["probes"].tolist(), learned_from, written)
        if listed:
            keys = self.waiting
            self._make(keys[:, :listed], keys[:, listed:], self.first + listed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()


def nearest(queries: Tensor, parts: list[Tensor], k: int) -> Tensor:
    """For each query (T, d) the places of the up to k keys, of all parts (n, d) together, that score highest.

    Keys are put into groups. The k groups with the highest maxima hold the k highest scores.
    """
    count = sum(len(part) for part in parts)
    k = min(k, count)
    width = -(-count // GROUP)
    if count <= 64 * GROUP or width <= k:
        if not count:
            return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        return torch.cat([queries @ part.T for part in parts], 1).topk(k, 1).indices
    rows = max(SCORES // count, 8)
    table = torch.full((rows, GROUP * width), -torch.inf, dtype=queries.dtype, device=queries.device)
    found = []
    for block in queries.split(rows):
        scores, begin = table[: len(block)], 0
        for part in parts:
            torch.mm(block, part.T, out=scores[:, begin : begin + len(part)])
            begin += len(part)
        grouped = scores.view(len(block), GROUP, width)
        groups = grouped.amax(1).topk(k, 1, sorted=False).indices
        candidates = grouped.gather(2, groups.unsqueeze(1).expand(-1, GROUP, -1)).flatten(1)
        best = candidates.topk(k, 1).indices
        found.append(best // k * width + groups.gather(1, best % k))
    return torch.cat(found)


def _stretches(first: int, end: int, capacity: int) -> list[tuple[int, int]]:
    """The slots of the numbers `first` to `end` in a ring, as at most two slices, oldest first."""
    if end <= first:
        return []
    a, b = first % capacity, (end - 1) % capacity + 1
    return [(a, b)] if a < b else [(a, capacity), (0, b)]


def write(ring: Tensor, new: Tensor, end: int) -> None:
    """Puts `new` (H, n, d) at the numbers from `end` on; of more than there is room for, the last."""
    capacity, count = ring.shape[1], new.shape[1]
    first = max(end, end + count - capacity)
    begin = first - end
    for a, b in _stretches(first, end + count, capacity):
        ring[:, a:b] = new[:, begin : begin + b - a]
        begin += b - a


def read(ring: Tensor, first: int, end: int) -> Tensor:
    """What stands at the numbers `first` to `end`, in order: (H, n, d)."""
    parts = [ring[:, a:b] for a, b in _stretches(first, end, ring.shape[1])]
    return torch.cat(parts, 1) if parts else ring[:, :0]


def take(ring: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands in the slots (H, T, k) of a ring (H, capacity, d): (H, T, k, d)."""
    heads, capacity, width = ring.shape
    places = slots + torch.arange(heads, device=slots.device).view(-1, 1, 1) * capacity
    return ring.view(-1, width).index_select(0, places.flatten()).view(*slots.shape, width).to(dtype)
