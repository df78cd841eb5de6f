"""Where the keys of one row's memory are, and how those nearest to a query are found: exactly, or by lists.

Keys are numbered in the order in which they came, from 0 at the document's start. A search is for the numbers `first`
to `end`; a number that is not found is -1.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from mnemic.memories.attention.lists import Lists

MISSING = -1
GROUP = 16  # scores of which first only the highest is looked at
SCORES = 1 << 21  # that are held at a time
PENDING = 512  # keys that wait to be listed
STALE = 32  # keys that are forgotten before they are taken out of their lists
FEWEST = 4096  # keys that are worth lists
ASKED, EACH = 256, 32  # queries by which recall is measured: of several searches, so many of each
FEW = 16  # of them that are looked at in passing
RENEWED = 1 / 8  # share of the keys after which lists are looked through


class Keys(Protocol):
    """The keys of one row, (H, n, d): added at the end, forgotten from the start."""

    def add(self, keys: Tensor) -> None:
        """Takes in the next keys, (H, n, d)."""

    def make_room(self, capacity: int) -> None:
        """From now on has room for so many keys."""

    def forget(self, first: int) -> None:
        """Lets go of the keys before number `first`."""

    def clear(self) -> None:
        """Lets go of all keys, and counts from 0 again."""

    def search(self, queries: Tensor, k: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The numbers (H, T, k) of the keys with the highest inner product with queries (H, T, d), and those keys.

        Products are compared as float32 at least, whatever the queries are; keys come as these do.
        """

    def all(self, first: int) -> Tensor:
        """The keys from number `first` on, in order."""

    def copy(self) -> Self:
        """The same keys once more."""

    def learned(self, first: int) -> dict[str, Tensor]:
        """What the search learned from the keys, to be saved beside those from number `first` on."""

    def load_learned(self, learned: dict[str, Tensor]) -> None:
        """Goes on with what was learned from the keys, which have been added."""


class ExactKeys:
    """Keys in a ring, all of which are compared with each query; in blocks, never in one large table of scores."""

    def __init__(self, heads: int, width: int, capacity: int, dtype: torch.dtype, device: Any) -> None:
        self.capacity = capacity
        self.end = 0
        self.ring = new_ring(heads, capacity, width, dtype, device)

    def add(self, keys: Tensor) -> None:
        """Takes in the next keys; the oldest are overwritten."""
        write(self.ring, keys, self.end)
        self.end += keys.shape[1]

    def make_room(self, capacity: int) -> None:
        """A larger ring."""
        first = max(self.end - self.capacity, 0)
        kept = read(self.ring, first, self.end)
        self.ring, self.capacity = new_ring(kept.shape[0], capacity, kept.shape[2], kept.dtype, kept.device), capacity
        write(self.ring, kept, first)

    def forget(self, first: int) -> None:
        """Nothing to do: what is old is overwritten, and searches say where they begin."""

    def clear(self) -> None:
        """Counts from 0 again."""
        self.end = 0

    def search(self, queries: Tensor, k: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The numbers and the keys with the highest inner products."""
        parts = [self.ring[:, a:b] for a, b in _stretches(first, end, self.capacity)]
        numbers = torch.full((*queries.shape[:2], k), MISSING, device=queries.device)
        wide = torch.promote_types(queries.dtype, torch.float32)
        for head, query in enumerate(queries.to(wide)):
            found = nearest(query, [part[head].to(wide) for part in parts], k)
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

    def learned(self, first: int) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_learned(self, learned: dict[str, Tensor]) -> None:
        """Nothing to do."""


class ListedKeys:
    """Keys in lists around points, in which a query looks where the points are nearest to it.

    The newest keys wait, and are compared one and all, until there are enough of them to be listed. Points are the
    row's own, are kept from document to document, and are learned again when the memory has grown fourfold since, when
    it is full, and whenever it has been replaced once: keys change while a model learns.
    """

    def __init__(self, size: int, k: int, recall: float, heads: int, width: int, dtype: torch.dtype) -> None:
        self.size, self.k, self.wanted, self.dtype = size, k, recall, dtype
        self.heads = [Lists(width, dtype) for _ in range(heads)]
        self.width = width
        self.learned_from = self.written = 0  # keys that points were learned from, and that were listed since
        self.clear()

    def clear(self) -> None:
        """Counts from 0 again; the points stay."""
        self.waiting = torch.empty(len(self.heads), 0, self.width, dtype=self.dtype)
        self.first = self.removed = self.listed = 0  # all keys before these numbers are: forgotten, taken out, listed
        self.any_listed = False
        self.loose = 0  # keys listed since lists were looked through
        self.queries: Tensor | None = None  # some of the last ones asked, to measure recall by

    @property
    def end(self) -> int:
        """The number of the next key."""
        return self.listed + self.waiting.shape[1]

    def add(self, keys: Tensor) -> None:
        """Takes in the next keys."""
        self.waiting = torch.cat([self.waiting, keys.to(self.dtype)], 1)

    def make_room(self, capacity: int) -> None:
        """Nothing to do: lists have room for all that they are given."""

    def forget(self, first: int) -> None:
        """Lets go of the keys before number `first`."""
        self.first = max(self.first, first)
        if self.any_listed:
            take_out = self.first - self.removed >= STALE
            self.removed = self.first if take_out else self.removed
            for lists in self.heads:
                lists.forget(self.first, take_out)
        elif self.first - self.listed >= PENDING:
            self._let_go()

    def _let_go(self) -> None:
        """Lets go of forgotten keys that wait, where nothing is listed."""
        self.waiting = self.waiting[:, self.first - self.listed :].clone()
        self.listed = self.removed = self.first

    def search(self, queries: Tensor, k: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The numbers and the keys with the highest inner products, as far as the lists tell."""
        dtype, queries = queries.dtype, queries.detach().float()
        asked = queries[:, :: max(queries.shape[1] // EACH, 1)].clone()
        self.queries = asked if self.queries is None else torch.cat([self.queries, asked], 1)[:, -ASKED:]
        self._list(end)
        others = 0  # keys that lists may give though they are forgotten, or the context holds them
        if self.any_listed:
            others = self.first - self.removed + max(self.listed - end, 0)
        numbers = torch.full((*queries.shape[:2], k + others), MISSING)
        new = torch.empty if self.any_listed else torch.zeros  # lists write every key
        keys = new(*numbers.shape, queries.shape[2])
        if self.any_listed:
            for head, query in enumerate(queries):
                self.heads[head].search(query, numbers[head], keys[head])
            numbers.masked_fill_((numbers < first) | (numbers >= end), MISSING)
        begin = max(first, self.listed)
        if others or end > begin:
            waiting = self.waiting[:, begin - self.listed : max(end - self.listed, 0)].float()
            parts = [
                self._with_waiting(*of_head, begin, k) for of_head in zip(queries, numbers, keys, waiting, strict=True)
            ]
            numbers, keys = (torch.stack(part) for part in zip(*parts, strict=True))
        return numbers, keys.to(dtype)

    @staticmethod
    def _with_waiting(
        queries: Tensor, numbers: Tensor, keys: Tensor, waiting: Tensor, begin: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """The k nearest of what the lists of a head gave, (T, n) and (T, n, d), and of keys numbered from `begin`."""
        new = nearest(queries, [waiting], k)
        numbers, keys = torch.cat([numbers, new + begin], 1), torch.cat([keys, waiting[new]], 1)
        scores = (queries.unsqueeze(1) @ keys.transpose(1, 2)).squeeze(1).masked_fill_(numbers == MISSING, -torch.inf)
        best = scores.topk(k, 1).indices
        return numbers.gather(1, best), keys.gather(1, best.unsqueeze(2).expand(-1, -1, keys.shape[2]))

    def _list(self, end: int) -> None:
        """Lists the waiting keys before number `end`, if there are enough; with new points, all keys."""
        begins = not self.any_listed
        ready = end - (self.first if begins else self.listed)
        if ready < (FEWEST if begins else PENDING):
            return
        if begins:
            self._let_go()
        if self._due(end - self.first):
            self._learn(end)
        elif self.learned_from:
            for head, lists in enumerate(self.heads):
                add = lists.fill if begins else lists.add
                add(self.waiting[head, :ready].float().numpy(), self.listed)
            self.written += ready
            self.loose += ready
            if self.loose >= max((end - self.first) * RENEWED, FEWEST):
                self.loose = 0
                self.compact()
                self.adjust()
            self._no_longer_waiting(end)

    def adjust(self) -> None:
        """Looks into more lists or fewer, as a few of the last queries need it."""
        if self.queries is not None:
            some = self.queries[:, :: max(self.queries.shape[1] // FEW, 1)]
            for lists, asked in zip(self.heads, some, strict=True):
                lists.adjust(asked, self.k, self.wanted)

    def compact(self) -> None:
        """Makes lists small again, which grow and shrink with what comes and goes."""
        for lists in self.heads:
            lists.compact()

    def _no_longer_waiting(self, end: int) -> None:
        self.waiting, self.listed, self.any_listed = self.waiting[:, end - self.listed :].clone(), end, True

    def _due(self, held: int) -> bool:
        """Whether points are to be learned from the `held` keys that there are."""
        full = held >= self.size and self.learned_from < self.size
        return held >= FEWEST and (held >= 4 * self.learned_from or full or self.written >= self.size)

    def _learn(self, end: int) -> None:
        """Learns points from all keys before number `end` and lists these keys, head by head."""
        for head, lists in enumerate(self.heads):
            keys = self._keys(head, self.first)[: end - self.first]
            asked = keys[-ASKED:] if self.queries is None else self.queries[head]
            lists.learn(keys, self.first, asked, self.k, self.wanted)
        self.learned_from, self.written, self.loose, self.removed = end - self.first, 0, 0, self.first
        self._no_longer_waiting(end)

    def _keys(self, head: int, first: int) -> Tensor:
        waiting = self.waiting[head, max(first - self.listed, 0) :]
        return torch.cat([self.heads[head].keys(first, self.listed), waiting]) if self.any_listed else waiting

    def all(self, first: int) -> Tensor:
        """The keys from number `first` on, in order."""
        return torch.stack([self._keys(head, first) for head in range(len(self.heads))])

    def recall(self, k: int) -> float | None:
        """The share of the true nearest that the last queries find, or None if nothing is listed yet."""
        if not self.any_listed or self.queries is None:
            return None
        found = [lists.recall(asked, k) for lists, asked in zip(self.heads, self.queries, strict=True)]
        return sum(found) / len(found)

    def copy(self) -> Self:
        """The same keys once more; what is not written to is shared."""
        twin = copy.copy(self)
        twin.heads = [lists.copy() for lists in self.heads]
        return twin

    def learned(self, first: int) -> dict[str, Tensor]:
        """The points (lists, H, d), how many lists are looked into, how many keys are listed, and what was asked."""
        points = asked = torch.empty(0, len(self.heads), self.width)
        if self.queries is not None:
            asked = self.queries.transpose(0, 1)
        if self.learned_from:
            points = torch.stack([lists.learned() for lists in self.heads], 1)
        listed = max(self.listed - first, 0) if self.any_listed else 0
        return {
            "points": points,
            "probes": torch.tensor([lists.probes for lists in self.heads]),
            "asked": asked,
            "learning": torch.tensor([len(points), listed, self.learned_from, self.written, len(asked), self.loose]),
        }

    def load_learned(self, learned: dict[str, Tensor]) -> None:
        """Lists as many of the keys as were listed."""
        count, listed, self.learned_from, self.written, asked, self.loose = learned["learning"].tolist()
        self.queries = learned["asked"][:asked].transpose(0, 1) if asked else None
        if not count:
            return
        for head, lists in enumerate(self.heads):
            lists.load(learned["points"][:count, head], int(learned["probes"][head]))
            if listed:
                lists.fill(self.waiting[head, :listed].float().numpy(), self.first)
        if listed:
            self.waiting, self.listed, self.removed = self.waiting[:, listed:].clone(), self.first + listed, self.first
            self.any_listed = True

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
    rows = min(max(SCORES // count, 8), len(queries))
    table = torch.empty((rows, GROUP * width), dtype=queries.dtype, device=queries.device)
    table[:, count:] = -torch.inf
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


def new_ring(heads: int, capacity: int, width: int, dtype: torch.dtype, device: Any) -> Tensor:
    """A ring (H, capacity, d) whose pages are taken when they are written.

    In place of a pair that is not there, slot 0 is read and weighed with 0: whatever memory held there before would do,
    but for what is not a number.
    """
    ring = torch.empty(heads, capacity, width, dtype=dtype, device=device)
    ring[:, :1] = 0
    return ring


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
