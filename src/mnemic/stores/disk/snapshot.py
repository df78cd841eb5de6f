"""One version of a store, opened: its rows and its index. It never changes, whatever writers do meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import xxhash
from numpy.typing import NDArray

from mnemic.errors import DamagedError, UsageError
from mnemic.stores.base import EVERYTHING, Floats, Found, Ids, References, Rows, Source, Where, nothing
from mnemic.stores.disk.columns import Column, in_type, open_inside
from mnemic.stores.disk.index import (
    EXACT_BYTES,
    Exact,
    Index,
    Nearest,
    Searcher,
    Selection,
    best_of,
    faiss_metric,
    look_at_all,
    top,
    true_scores,
)
from mnemic.stores.disk.manifest import Manifest
from mnemic.stores.disk.segments import Segment, key_type, pieces

CHECKED_AT_ONCE = 1 << 30  # bytes of keys that are checked before the first of them is looked at again
CANDIDATES = 1 << 21  # rows that are looked at again at a time
REMEMBERED = 4  # selections kept ready
FIRST = np.zeros((), np.int64)  # the lowest id, as an array: numpy compares with it in half the time


def index_path(folder: Path, number: int) -> Path:
    """Where an index is."""
    return folder / f"index-{number:08d}.faiss"


class Snapshot:
    """Rows, search and references of one version."""

    def __init__(
        self, folder: Path, manifest: Manifest, known: Snapshot | None = None, without_index: str = ""
    ) -> None:
        """Opens all files; segments that `known`, another version, has open already are taken from it.

        `without_index` says why the index cannot be used, if so: all but searches works, and it can be made anew.
        """
        self.folder, self.manifest, self.config = folder, manifest, manifest.config
        opened = {segment.record: segment for segment in known.segments} if known is not None else {}
        self.segments: list[Segment] = [
            opened.get(record) or Segment(folder, record, self.config) for record in manifest.segments
        ]
        self.without_index = without_index
        self._index_file = None if without_index else self._open_index()
        self._lock = threading.Lock()  # of what is remembered
        self.bytes = 0  # of all its files
        self._exact: dict[tuple[Where, int], Exact] = {}
        self._selections: dict[Where, tuple[Selection | None, int]] = {}
        self._ready: dict[tuple[int, float], tuple[Searcher, int]] = {}

    def _open_index(self) -> int | None:
        record = self.manifest.index
        if record is None:
            return None
        path = index_path(self.folder, record.file)
        descriptor = open_inside(path)
        if (size := os.fstat(descriptor).st_size) != record.bytes:
            os.close(descriptor)
            raise DamagedError(
                f"{path} has {size} bytes where {record.bytes} belong: it was cut short or exchanged; {self.remedy}"
            )
        return descriptor

    def close(self) -> None:
        """Lets go of the index's file; those of rows are closed when nobody uses them any more."""
        if self._index_file is not None:
            os.close(self._index_file)
            self._index_file = None

    @cached_property
    def index(self) -> Index | None:
        """The index, read and checked as a whole at its first use."""
        record = self.manifest.index
        self.check_index()
        if record is None or self._index_file is None:
            return None
        index = faiss.read_index(f"/dev/fd/{self._index_file}")
        if (index.d, index.metric_type, index.ntotal) != (self.config.dim, faiss_metric(self.config), record.rows):
            raise DamagedError(f"{index_path(self.folder, record.file)} does not fit the store: files were exchanged")
        return Index(index, self.config, record.curve)

    def take_index(self) -> Any:
        """FAISS's index for someone who changes it; who searches this version afterwards reads it again."""
        index = self.index
        self.__dict__.pop("index", None)
        self._ready.clear()
        return index.faiss if index is not None else None

    def check_index(self) -> None:
        """Compares the index's file with its checksum."""
        if self.without_index:
            raise DamagedError(self.without_index)
        record = self.manifest.index
        if record is None or self._index_file is None:
            return
        digest, place = xxhash.xxh3_128(), 0
        while piece := os.pread(self._index_file, 1 << 22, place):
            digest.update(piece)
            place += len(piece)
        if digest.hexdigest() != record.checksum:
            raise DamagedError(f"{index_path(self.folder, record.file)} is damaged: {self.remedy}")

    @property
    def remedy(self) -> str:
        """What helps against a damaged index."""
        if self.config.keys == "codes":
            return "its keys are nowhere else, so copy it back from a backup or build the store again"
        return "`mnemic store compact --rebuild` makes it again from the rows"

    # Rows

    @cached_property
    def _runs(self) -> tuple[Ids, NDArray[np.int64], NDArray[np.int64], Ids]:
        """First id, segment, first row and end id of each run of consecutive ids, in order."""
        firsts, owners, rows, ends = [], [], [], []
        for number, segment in enumerate(self.segments):
            runs = segment.runs
            firsts.append(runs[:, 1])
            rows.append(runs[:, 0])
            owners.append(np.full(len(runs), number))
            ends.append(runs[:, 1] + np.diff(np.r_[runs[:, 0], segment.rows]))
        if not firsts:
            empty = np.empty(0, np.int64)
            return empty, empty, empty, empty
        first, owner, row, end = (np.concatenate(column) for column in (firsts, owners, rows, ends))
        if (first[1:] < end[:-1]).any() or end[-1] > self.manifest.next_id:
            raise DamagedError(f"{self.folder}: the numbers of its rows are out of order")
        return first, owner, row, end

    @property
    def end(self) -> int:
        """One more than the highest number of a row: no more than that has to be set aside for marks."""
        ends = self._runs[3]
        return int(ends[-1]) if len(ends) else 0

    def locate(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Segment and row in it of each id; segment -1 where there is no such row."""
        first, owner, row, end = self._runs
        run = np.searchsorted(first, ids, "right") - 1
        if not len(first):
            return run, run
        there = (run >= 0) & (ids < end[run])
        return np.where(there, owner[run], -1), row[run] + ids - first[run]

    def take(self, column: Callable[[Segment], Column | None], ids: Ids, into: NDArray[Any]) -> NDArray[Any]:
        """The entries of a column for these ids, or what was `into` that array where there are none."""
        owners, rows = self.locate(ids)
        for number in np.flatnonzero(np.bincount(owners, minlength=1)):
            if (found := column(self.segments[number])) is not None:
                here = np.flatnonzero(owners == number)
                into[here] = found.take(rows[here])
        return into

    def values_of(self, ids: Ids) -> NDArray[np.int64]:
        """The value of each row."""
        if self._in_order:
            return self.segments[0].values.take(ids).astype(np.int64)
        flat = self.take(lambda segment: segment.values, ids.reshape(-1), np.empty(ids.size, np.uint32))
        return flat.reshape(ids.shape).astype(np.int64)

    def keys_of(self, ids: Ids) -> NDArray[np.generic]:
        """The key of each row, as it is stored."""
        if self._in_order and (keys := self.segments[0].keys) is not None:
            return keys.take(ids).reshape(len(ids), self.config.dim)
        empty = np.empty((len(ids), self.config.dim), key_type(self.config))
        return self.take(lambda segment: segment.keys, ids, empty).reshape(empty.shape)

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def _rows(self) -> int:
        return sum(segment.rows for segment in self.segments) - sum(count for _, count in self.manifest.deleted)

    def get(self, ids: Ids) -> Rows:
        """Rows with their references."""
        owners, rows = self.locate(ids)
        gone = owners < 0
        for first, count in self.manifest.deleted:
            gone |= (ids >= first) & (ids < first + count)
        if gone.any():
            raise UsageError(f"no row has the number {ids[gone][0]}: it was deleted, or never committed")
        sources: list[Source] = []
        which, positions = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        for number in np.unique(owners).tolist():
            segment, here = self.segments[number], np.flatnonzero(owners == number)
            used, local = np.unique(segment.sources_of(rows[here]), return_inverse=True)
            which[here] = local + len(sources)
            sources += [segment.sources[source] for source in used.tolist()]
            positions[here] = segment.positions.take(rows[here])
        keep = all(self.segments[number].keys is not None for number in np.unique(owners).tolist())
        keys = in_type(self.keys_of(ids), np.float32) if keep else None
        return Rows(keys, self.values_of(ids), References(sources, which, positions))

    # Which rows may be found

    def selection(self, where: Where) -> tuple[Selection | None, int]:
        """By id which rows are meant, up to the last row, and how many; None for all rows that there are."""
        if not self.manifest.deleted and where.everything:
            return None, self._rows
        with self._lock:
            if (known := self._selections.get(where)) is None:
                while len(self._selections) >= REMEMBERED:
                    self._selections.pop(next(iter(self._selections)))
                known = self._selections[where] = self._select(where)
        return known

    def _select(self, where: Where) -> tuple[Selection, int]:
        mask = np.zeros(self.end, np.bool_)
        for segment in self.segments:
            met = segment.matching(where.__contains__)
            bounds = np.r_[segment.runs[:, 0], segment.rows]
            for (row, first), end in zip(segment.runs.tolist(), bounds[1:].tolist(), strict=True):
                mask[first : first + end - row] = met[row:end]
        for first, count in self.manifest.deleted:
            mask[first : first + count] = False
        return mask, int(mask.sum())

    def forgotten_names(self) -> set[str]:
        """The documents and namespaces that have rows here, all of which are deleted."""
        selection, _ = self.selection(Where())
        known, left = set[Source](), set[Source]()
        for segment in self.segments:
            rows = np.arange(segment.rows)
            if selection is not None:
                rows = rows[selection[segment.ids_of(rows)]]
            known |= set(segment.sources)
            left |= {segment.sources[number] for number in np.unique(segment.sources_of(rows)).tolist()}
        return {name for source in known for name in source} - {name for source in left for name in source}

    def key_pieces(self, where: Where = Where(), first_id: int = 0) -> Iterator[tuple[Ids, Floats]]:  # noqa: B008
        """Ids and keys of the rows that are meant and have an id of at least `first_id`, in order."""
        selection, _ = self.selection(where)
        for segment in self.segments:
            if segment.keys is None:
                continue
            for start, end in pieces(segment.rows):
                rows = np.arange(start, end)
                ids = segment.ids_of(rows)
                keep = ids >= first_id if selection is None else selection[ids] & (ids >= first_id)
                if keep.all():
                    yield ids, in_type(segment.keys.part(start, end).reshape(-1, self.config.dim), np.float32)
                elif keep.any():
                    yield ids[keep], in_type(segment.keys.take(rows[keep]).reshape(-1, self.config.dim), np.float32)

    # Search

    def search(self, queries: Floats, k: int, where: Where, recall: float) -> Found:
        """The nearest rows, from the index and from the rows that it does not cover yet."""
        ready = self._ready.get((k, recall)) if where is EVERYTHING else None
        answer = ready[0](queries) if ready and len(queries) <= ready[1] else None
        if answer is not None and np.count_nonzero(mask := answer[0] >= FIRST) == mask.size:
            return Found(*answer, self.values_of(answer[0]), mask)
        return self._search(queries, k, where, recall, answer)

    def _search(self, queries: Floats, k: int, where: Where, recall: float, answer: Nearest | None) -> Found:
        """The same step by step; `answer` is that of the index, if it is known."""
        selection, count = self.selection(where)
        if not count:
            return nothing(len(queries), k)
        index, record = self.index, self.manifest.index
        if index is None or record is None or (selection is not None and self._better_without(where, count)):
            return self._found(*self._look_at(where, 0, queries, k), k)
        ids, scores = answer or self._ask_index(index, queries, k, selection, recall)
        self._ask_again(ids, scores, index, record.end, queries, k, selection, recall)
        if record.end < self.manifest.next_id:
            ids, scores = best_of([(ids, scores), self._look_at(where, record.end, queries, k)], k)
        elif selection is None and k <= index.rows:
            self._make_ready(index, k, recall)
        return self._found(ids, scores, k)

    def _make_ready(self, index: Index, k: int, recall: float) -> None:
        """Keeps a search of all rows for the next time, with the number of queries up to which it is one step."""
        lists, refine = index.dial(recall, k)
        if refine == 1:
            self._ready[k, recall] = index.searcher(k, lists), sys.maxsize
        elif (keys := self._checked_keys()) is not None:
            candidates = index.candidates(k, refine)
            searcher = index.searcher(k, lists, None, candidates, keys.faiss_view(self.config))
            self._ready[k, recall] = searcher, max(1, CANDIDATES // candidates)

    def _better_without(self, where: Where, count: int) -> bool:
        """Whether so few rows are meant that it is best to look at them all."""
        return self.config.keys != "codes" and not where.everything and count * self.config.dim * 4 <= EXACT_BYTES

    def _look_at(self, where: Where, first_id: int, queries: Floats, k: int) -> Nearest:
        """The nearest by looking at every row from `first_id` on; a few rows are kept ready for the next time."""
        selection, count = self.selection(where)
        rows = self.manifest.next_id - first_id if selection is None else int(selection[first_id:].sum())
        if min(rows, count) * self.config.dim * 4 > EXACT_BYTES:
            return look_at_all(self.config, self.key_pieces(where, first_id), queries, k)
        name = (where, first_id)
        if (known := self._exact.get(name)) is None:
            known = Exact(self.config, self.key_pieces(where, first_id))
            with self._lock:
                while len(self._exact) >= REMEMBERED:
                    self._exact.pop(next(iter(self._exact)))
                self._exact[name] = known
        return known.search(queries, k)

    def _ask_index(
        self, index: Index, queries: Floats, k: int, selection: Selection | None, recall: float, more: int = 1
    ) -> Nearest:
        """The nearest of the rows that the index covers, in `more` times as many lists as that usually takes."""
        k = min(k, index.rows)
        if not k:
            return np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32)
        lists, refine = index.dial(recall, k)
        if refine == 1:
            return index.search(queries, k, lists * more, selection)
        candidates = index.candidates(k, refine)
        step = max(1, CANDIDATES // candidates)  # a part of the queries at a time: candidates are many
        parts = [queries[start : start + step] for start in range(0, len(queries), step)]
        answers = [self._look_twice(part, k, lists * more, selection, candidates) for part in parts]
        if len(answers) == 1:
            return answers[0]
        return np.concatenate([ids for ids, _ in answers]), np.concatenate([scores for _, scores in answers])

    def _ask_again(
        self,
        ids: Ids,
        scores: Floats,
        index: Index,
        end: int,
        queries: Floats,
        k: int,
        selection: Selection | None,
        recall: float,
    ) -> None:
        """Looks into more lists for those queries that found less than there is, rows below `end`, and fills it in."""
        enough = min(k, index.rows if selection is None else int(selection[:end].sum()), ids.shape[1])
        more = 1
        while enough and more < index.lists and (short := ids[:, enough - 1] < 0).any():
            more *= 8
            ids[short], scores[short] = self._ask_index(index, queries[short], k, selection, recall, more)

    def _look_twice(self, queries: Floats, k: int, lists: int, selection: Selection | None, candidates: int) -> Nearest:
        """The k nearest by their true scores, of so many candidates by the index's scores."""
        index = self.index
        if index is None:
            return self._look_at(Where(), 0, queries, k)
        if (keys := self._checked_keys()) is not None:  # FAISS does both at once
            return index.searcher(k, lists, selection, candidates, keys.faiss_view(self.config))(queries)
        ids, _ = index.search(queries, candidates, lists, selection)
        return top(ids, self.rescored(queries, ids), k)

    def _checked_keys(self) -> Column | None:
        """The keys of all rows, numbered as their ids, if they are so and every one of them was checked."""
        keys = self.segments[0].keys if self._in_order else None
        if keys is not None and keys.bytes <= CHECKED_AT_ONCE:
            keys.check_all()
        return keys if keys is not None and keys.checked else None

    @cached_property
    def _in_order(self) -> bool:
        """Whether all rows are in one segment, and are numbered as their ids."""
        first = self._runs[0]
        return len(first) == 1 and bool(first[0] == 0)

    def rescored(self, queries: Floats, ids: Ids) -> Floats:
        """The true scores of candidates (queries, n); -inf for id -1."""
        missing = ids < 0
        wanted = np.where(missing, self._runs[0][0], ids).reshape(-1)
        scores = true_scores(self.config, queries, ids.shape[1], lambda start, end: self.keys_of(wanted[start:end]))
        scores[missing] = -np.inf
        return scores

    def _found(self, ids: Ids, scores: Floats, k: int) -> Found:
        missing = k - ids.shape[1]
        if missing > 0:
            ids = np.pad(ids, ((0, 0), (0, missing)), constant_values=-1)
            scores = np.pad(scores, ((0, 0), (0, missing)))
        mask = ids >= 0
        if np.count_nonzero(mask) == mask.size:
            return Found(ids, scores, self.values_of(ids), mask)
        ids[~mask], scores[~mask] = 0, -np.inf
        values = np.zeros(ids.shape, np.int64)
        values[mask] = self.values_of(ids[mask])
        return Found(ids, scores, values, mask)
