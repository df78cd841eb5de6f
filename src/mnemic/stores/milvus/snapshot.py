"""One version of a store on Milvus: finding rows, and looking at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mnemic.errors import DamagedError, UsageError
from mnemic.stores.base import Floats, Found, Ids, LookedUp, References, Rows, Where, nothing
from mnemic.stores.milvus.index import DEPTH, SAMPLE, enough_lists, measure
from mnemic.stores.milvus.manifest import Manifest
from mnemic.stores.milvus.names import Names
from mnemic.stores.milvus.server import (
    EVERY_LIST,
    MESSAGE_BYTES,
    MOST_FOUND,
    ROWS,
    UNSETTLED,
    Nearest,
    Server,
    both,
    one_of,
)


class Snapshot:
    """The rows that are committed, as the manifest has them."""

    def __init__(self, server: Server, manifest: Manifest) -> None:
        self.manifest = manifest
        self.names = Names(server, manifest)
        self._server = server
        self._settled = manifest.settled
        self._meets_others = False  # whether searches meet rows that are not of this version

    def _committed(self, rows: str = "") -> str:
        """The filter for rows of this version that also fit another filter."""
        return both(rows, self.names.alive(), f"id < {self.manifest.next_id}")

    def search(self, queries: Floats, k: int, where: Where, recall: float) -> Found:
        """The nearest rows; every one is looked at if `recall` is 1 or the search is confined."""
        found = nothing(len(queries), k)
        confined = self.names.filter(where)
        limit = min(k, self.manifest.rows)
        if confined is None or not limit:
            return found
        if limit > MOST_FOUND:
            raise UsageError(f"k = {k}: Milvus finds at most {MOST_FOUND} rows for a query")
        # Few lists hold few of the rows that a confined search may show: all of them are looked into.
        lists = EVERY_LIST if confined else enough_lists(self.manifest.curve, recall)
        near = self._nearest(queries, limit, confined, lists)
        if lists < EVERY_LIST and (near.ids[:, -1] < 0).any():
            near = self._nearest(queries, limit, confined, EVERY_LIST)
        there = near.ids >= 0
        score = -near.distances if self.manifest.config.metric == "l2" else near.distances
        found.mask[:, :limit] = there
        found.ids[:, :limit] = np.where(there, near.ids, 0)
        found.scores[:, :limit] = np.where(there, score, -np.inf)
        found.values[:, :limit] = near.values
        return found

    def _nearest(self, queries: Floats, limit: int, confined: str, lists: int) -> Nearest:
        """What the server finds among the rows of this version.

        To leave others out by a filter costs a look at the number of each row. That is done only if one was met.
        """
        manifest = self.manifest
        if lists == EVERY_LIST and manifest.index != "exact" and manifest.next_id - self._settled > UNSETTLED:
            self._server.settle(manifest.config, manifest.index)
            self._settled = manifest.next_id
        if not self._meets_others:
            near = self._server.search(queries, limit, both(confined, self.names.alive()), lists, manifest.time)
            self._meets_others = bool((near.ids >= manifest.next_id).any())
            if not self._meets_others:
                return near
        return self._server.search(queries, limit, self._committed(confined), lists, manifest.time)

    def look_up(self, ids: Ids, where: Where) -> LookedUp:
        """Keys and values of the rows of these numbers that are there and meant."""
        confined = self.names.filter(where)
        rows = {} if confined is None else self._fetch(ids.tolist(), ("key", "value"), confined)
        there = np.array([number in rows for number in ids.tolist()], np.bool_)
        found = [rows[number] for number in ids[there].tolist()]
        keys = np.array([row["key"] for row in found], np.float32).reshape(len(found), self.manifest.config.dim)
        return LookedUp(there, keys, np.array([row["value"] for row in found], np.int64))

    def _fetch(self, ids: list[int], fields: Sequence[str], confined: str = "") -> dict[int, dict[str, Any]]:
        """By number, the rows of these numbers that there are."""
        possible, there = [number for number in ids if 0 <= number < self.manifest.next_id], dict[int, dict[str, Any]]()
        step = max(1, min(MOST_FOUND, MESSAGE_BYTES // (4 * self.manifest.config.dim + 64)))
        for start in range(0, len(possible), step):
            rows = both(one_of("id", possible[start : start + step]), confined, self.names.alive())
            some = self._server.fetch(rows, ("id", *fields), ROWS, self.manifest.time)
            there |= {row["id"]: row for row in some}
        return there

    def get(self, ids: Ids) -> Rows:
        """The rows of these numbers."""
        wanted = np.unique(ids).tolist()
        there = self._fetch(wanted, ("key", "value", "position", "source", "space"))
        for number in wanted:
            if number not in there:
                raise UsageError(f"no row has the number {number}: it was deleted, or never committed")
        rows = [there[number] for number in ids.tolist()]
        sources = self.names.sources({row["source"]: row["space"] for row in rows})
        places = {number: place for place, number in enumerate(sources)}
        for row in rows:
            if row["source"] not in places:
                raise DamagedError(f"row {row['id']} belongs to a document whose name is not there: verify the store")
        keys = np.array([row["key"] for row in rows], np.float32).reshape(len(rows), self.manifest.config.dim)
        values, positions = (np.array([row[name] for row in rows], np.int64) for name in ("value", "position"))
        which = np.array([places[row["source"]] for row in rows], np.int64)
        return Rows(keys, values, References([*sources.values()], which, positions))

    def namespaces(self) -> dict[str, int]:
        """How many rows each namespace has, those with none included."""
        rows = {name: self._committed(one_of("space", [space])) for name, space in self.names.spaces().items()}
        return {name: self._server.count(filter, ROWS, self.manifest.time) for name, filter in sorted(rows.items())}

    def verify(self, progress: Callable[[int, int], None] | None) -> list[str]:
        """Whether each row that was committed is there once, and its document and namespace have names."""
        seen, expected, nameless = 0, self.manifest.rows, set[int]()
        rows = self._committed("id >= 0")
        for page in self._server.pages(rows, ("source", "space"), ROWS, self.manifest.time):
            sources = {row["source"]: row["space"] for row in page}
            nameless |= sources.keys() - self.names.sources(sources).keys()
            seen += len(page)
            if progress is not None:
                progress(seen, expected)
        there = self._server.count(rows, ROWS, self.manifest.time)
        wrong = [f"document number {number} has rows and no name" for number in sorted(nameless)]
        if not seen == there == expected:
            wrong.append(f"{there} rows are there under {seen} numbers, where {expected} were committed")
        return wrong

    def curve(self) -> list[list[float]]:
        """The recall of the index, measured with some of its rows as queries; none of them finds itself."""
        some = np.random.default_rng(self.manifest.version).integers(0, self.manifest.next_id, SAMPLE).tolist()
        sample = self._committed(one_of("id", some))
        rows = self._server.fetch(sample, ("id", "key"), ROWS, self.manifest.time)
        queries, own = np.array([row["key"] for row in rows], np.float32), [row["id"] for row in rows]

        def nearest(lists: int) -> list[list[int]]:
            near = self._nearest(queries, DEPTH + 1, "", lists).ids.tolist()
            return [[id for id in row if id not in (-1, self_id)] for row, self_id in zip(near, own, strict=True)]

        return measure(nearest) if rows else []
