"""A store in memory that looks at every row: exact, gone when the process ends, and the oracle of all others' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemic.errors import UsageError
from mnemic.stores.base import Floats, Found, Ids, LookedUp, References, Rows, Source, Store, Summary, Where, nothing
from mnemic.stores.config import StoreConfig

BLOCK = 1 << 22  # scores computed at a time


class RamStore(Store):
    """Rows in plain arrays; scores in float64 from the keys as they would be stored."""

    def __init__(self, address: str, config: StoreConfig | None) -> None:
        if config is None:
            raise UsageError("a store in memory begins empty: give its settings, StoreConfig(dim=...)")
        self.address, self.config, self.version = address, config, 0
        self._keys = np.empty((0, config.dim), np.float16 if config.keys == "float16" else np.float32)
        self._values = self._positions = self._which = self._ids = np.empty(0, np.int64)
        self._sources: dict[Source, int] = {}
        self._next = 0
        self._added: list[tuple[Any, ...]] = []
        self._deleted: list[tuple[Where, int]] = []

    def _add(self, keys: Floats, values: NDArray[np.int64], references: References) -> Ids:
        numbers = np.array([self._sources.setdefault(d, len(self._sources)) for d in references.sources])
        ids = np.arange(self._next, self._next + len(keys))
        self._next += len(keys)
        kept = keys.astype(self._keys.dtype)
        self._added.append((kept, values, references.positions, numbers[references.which], ids))
        return ids

    def _delete(self, where: Where) -> int:
        before = [self._live(self._which, self._ids), *(self._live(row[3], row[4]) for row in self._added)]
        self._deleted.append((where, self._next))
        after = [self._live(self._which, self._ids), *(self._live(row[3], row[4]) for row in self._added)]
        return int(sum(map(np.sum, before)) - sum(map(np.sum, after)))

    def _live(self, which: NDArray[np.int64], ids: Ids) -> NDArray[np.bool_]:
        """Which rows no deletion has met."""
        live = np.ones(len(which), np.bool_)
        for where, end in self._deleted:
            met = np.array([source in where for source in self._sources], np.bool_)
            live &= ~(met[which] & (ids < end)) if len(met) else True
        return live

    def commit(self, index: bool = True) -> int:
        self._check_open()
        old = (self._keys, self._values, self._positions, self._which, self._ids)
        columns = [np.concatenate(parts) for parts in zip(old, *self._added, strict=True)]
        live = self._live(columns[3], columns[4])
        self._keys, self._values, self._positions, self._which, self._ids = (column[live] for column in columns)
        if self._added or self._deleted:
            self.version += 1
        self._added, self._deleted = [], []
        return self.version

    def compact(self, progress: Callable[[int, int], None] | None = None, rebuild: bool = False) -> int:
        return self.commit()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        return []

    def refresh(self) -> int:
        return self.version

    def _search(self, queries: Floats, k: int, where: Where, recall: float) -> Found:
        wanted = np.array([source in where for source in self._sources], np.bool_)
        rows = np.flatnonzero(wanted[self._which]) if len(self._which) else np.empty(0, np.int64)
        found = nothing(len(queries), k)
        count = min(k, len(rows))
        if not count:
            return found
        keys = self._keys[rows].astype(np.float64)
        step = max(1, BLOCK // (len(rows) * (self.config.dim if self.config.metric == "l2" else 1)))
        for start in range(0, len(queries), step):
            scores = self._scores(queries[start : start + step].astype(np.float64), keys)
            best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            here = slice(start, start + step)
            found.scores[here, :count] = np.take_along_axis(scores, best, 1)
            found.ids[here, :count] = self._ids[rows[best]]
            found.values[here, :count] = self._values[rows[best]]
            found.mask[here, :count] = True
        return found

    def _scores(self, queries: NDArray[np.float64], keys: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.config.metric == "l2":
            return -((queries[:, None] - keys) ** 2).sum(-1)
        return queries @ keys.T

    def _look_up(self, ids: Ids, where: Where) -> LookedUp:
        rows, there = self._locate(ids)
        wanted = np.array([source in where for source in self._sources], np.bool_)
        there[there] = wanted[self._which[rows[there]]]
        return LookedUp(there, self._keys[rows[there]].astype(np.float64), self._values[rows[there]])

    def _locate(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The place of each row, and whether there is one of that number."""
        rows = np.searchsorted(self._ids, ids)
        known = rows < len(self._ids)
        known[known] &= self._ids[rows[known]] == ids[known]
        return rows, known

    def _get(self, ids: Ids) -> Rows:
        rows, known = self._locate(ids)
        if not known.all():
            raise UsageError(f"no row has the number {ids[~known][0]}: it was deleted, or never committed")
        used, which = np.unique(self._which[rows], return_inverse=True)
        names = list(self._sources)
        references = References([names[number] for number in used], which, self._positions[rows])
        return Rows(self._keys[rows].astype(np.float32), self._values[rows], references)

    def summary(self) -> Summary:
        names = list(self._sources)
        used, counts = np.unique(self._which, return_counts=True)
        namespaces: dict[str, int] = {}
        for number, count in zip(used.tolist(), counts.tolist(), strict=True):
            namespaces[names[number].namespace] = namespaces.get(names[number].namespace, 0) + count
        size = self._keys.nbytes + self._values.nbytes + self._positions.nbytes + self._which.nbytes
        index = {"kind": "exact", "recall": 1.0}
        return Summary(
            self.address, self.version, len(self), len(used), dict(sorted(namespaces.items())), self.config, index, size
        )

    def _close(self) -> None:
        self._added, self._deleted = [], []

    @property
    def next_id(self) -> int:
        return self._next - sum(len(rows[0]) for rows in self._added)

    def __len__(self) -> int:
        return len(self._ids)
