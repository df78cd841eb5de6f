"""Rows that were written together: one file for each column, and one for the checksums of all their blocks.

values, positions   a number for each row
spans               (first row, source): from this row on, rows refer to this document
runs                (first row, first id): from this row on, ids count up from this one
sources             a line of JSON for each document: [name, namespace]
keys                the vectors, last, because a store of codes drops them
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from mnemic.errors import DamagedError
from mnemic.stores.base import Ids, Source
from mnemic.stores.config import StoreConfig
from mnemic.stores.disk.columns import Column, ColumnWriter, blocks_of
from mnemic.stores.disk.manifest import SegmentRecord

CHUNK = 1 << 15  # rows moved at a time


def key_type(config: StoreConfig) -> type[np.floating[Any]]:
    """The type in which keys are written; a store of codes keeps float16 until its index holds the rows."""
    return np.float32 if config.keys == "float32" else np.float16


def file_of(folder: Path, number: int, column: str) -> Path:
    """Where a column of a segment is."""
    return folder / f"rows-{number:08d}.{column}"


class SegmentWriter:
    """Takes in rows, straight to disk; only what there is of documents is held in memory."""

    def __init__(self, folder: Path, number: int, config: StoreConfig, keys: bool = True) -> None:
        self.folder, self.number, self.rows = folder, number, 0
        shapes: dict[str, tuple[Any, int]] = {"values": (np.uint32, 1), "positions": (np.uint32, 1)}
        if keys:
            shapes["keys"] = (key_type(config), config.dim)
        self._columns: dict[str, ColumnWriter] = {}
        try:
            for name, (dtype, width) in shapes.items():
                self._columns[name] = ColumnWriter(file_of(folder, number, name), dtype, width)
        except BaseException:
            self.abandon()
            raise
        self._sources: dict[Source, int] = {}
        self._spans: list[NDArray[np.int64]] = []
        self._runs: list[NDArray[np.int64]] = []
        self._last_source, self._next_id = -1, -1

    def append(
        self,
        keys: NDArray[np.generic] | None,
        values: NDArray[np.generic],
        positions: NDArray[np.generic],
        sources: Sequence[Source],
        which: NDArray[np.int64],
        ids: Ids,
    ) -> None:
        """Writes rows; row i refers to `sources[which[i]]`. What fails (a full disk) can be tried again."""
        if not len(ids):
            return
        with self._all_or_nothing():
            used = np.unique(which)
            number_of = np.zeros(len(sources), np.int64)
            for number in used.tolist():
                number_of[number] = self._sources.setdefault(sources[number], len(self._sources))
            which = number_of[which]
            self._spans.append(self._changes(which, np.r_[self._last_source, which[:-1]] != which))
            self._runs.append(self._changes(ids, np.r_[self._next_id, ids[:-1] + 1] != ids))
            self._last_source, self._next_id = int(which[-1]), int(ids[-1]) + 1
            if "keys" in self._columns and keys is not None:
                self._columns["keys"].append(keys)
            self._columns["values"].append(values)
            self._columns["positions"].append(positions)
            self.rows += len(ids)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Goes back to the state before if something fails."""
        rows, last_source, next_id = self.rows, self._last_source, self._next_id
        spans, runs, sources = len(self._spans), len(self._runs), len(self._sources)
        try:
            yield
        except BaseException:
            self.rows, self._last_source, self._next_id = rows, last_source, next_id
            del self._spans[spans:], self._runs[runs:]
            self._sources = dict(itertools.islice(self._sources.items(), sources))
            for column in self._columns.values():
                column.cut_back(rows)
            raise

    def _changes(self, numbers: NDArray[np.int64], new: NDArray[np.bool_]) -> NDArray[np.int64]:
        rows = np.flatnonzero(new)
        return np.stack([rows + self.rows, numbers[rows]], 1)

    def matching(self, wanted: Callable[[Source], bool]) -> NDArray[np.bool_]:
        """Which of the rows so far refer to documents that are wanted."""
        spans = np.concatenate([*self._spans, np.array([[self.rows, 0]])])
        met = np.array([wanted(source) for source in self._sources], np.bool_)
        return np.repeat(met[spans[:-1, 1]], np.diff(spans[:, 0]))

    def copy(self, segment: Segment, keep: NDArray[np.bool_] | None = None) -> None:
        """Takes in the rows of another segment, or those to keep."""
        for start, end in pieces(segment.rows):
            rows = np.arange(start, end)
            if keep is not None:
                rows = rows[keep[start:end]]
            keys = segment.keys.take(rows) if segment.keys is not None else None
            self.append(
                keys,
                segment.values.take(rows),
                segment.positions.take(rows),
                segment.sources,
                segment.sources_of(rows),
                segment.ids_of(rows),
            )

    def finish(self) -> SegmentRecord:
        """Makes everything durable; the record is what a manifest needs. More rows may follow, and another `finish`."""
        spans, runs = np.concatenate(self._spans), np.concatenate(self._runs)
        lines = "".join(json.dumps(list(source), ensure_ascii=False) + "\n" for source in self._sources).encode()
        small: tuple[tuple[str, Any, Any, int], ...] = (
            ("spans", spans, np.int64, 2),
            ("runs", runs, np.int64, 2),
            ("sources", np.frombuffer(lines, np.uint8), np.uint8, 1),
        )
        sums_of = {name: column.finish() for name, column in self._columns.items()}
        sums_of |= {name: self._write(name, data, dtype, width) for name, data, dtype, width in small}
        sums = np.array([one for name in COLUMNS for one in sums_of.get(name, [])], np.uint64)
        self._write("sums", sums, np.uint64, 1)
        checksum = xxhash.xxh3_128_hexdigest(sums.astype("<u8").tobytes())
        return SegmentRecord(
            self.number, self.rows, len(spans), len(runs), len(lines), "keys" in self._columns, checksum
        )

    def _write(self, name: str, data: NDArray[np.generic], dtype: DTypeLike, width: int) -> list[int]:
        with contextlib.closing(ColumnWriter(file_of(self.folder, self.number, name), dtype, width)) as column:
            column.append(data)
            return column.finish()

    def close(self) -> None:
        """Lets go of the files."""
        for column in self._columns.values():
            column.close()

    def abandon(self) -> None:
        """Removes what was written."""
        self.close()
        remove(self.folder, self.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.rows:
            self.close()
        else:
            self.abandon()


COLUMNS = ("values", "positions", "spans", "runs", "sources", "keys")


def remove(folder: Path, number: int, columns: Sequence[str] = (*COLUMNS, "sums")) -> None:
    """Removes files of a segment, those that are there."""
    for column in columns:
        with contextlib.suppress(FileNotFoundError):
            file_of(folder, number, column).unlink()


def pieces(rows: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive pieces."""
    return ((start, min(start + size, rows)) for start in range(0, rows, size))


class Segment:
    """A segment on disk; its files are open, so that it stays readable when another process removes it."""

    def __init__(self, folder: Path, record: SegmentRecord, config: StoreConfig) -> None:
        self.record, self.rows = record, record.rows
        self._folder = folder
        shapes: dict[str, tuple[Any, int, int]] = {
            "values": (np.uint32, record.rows, 1),
            "positions": (np.uint32, record.rows, 1),
            "spans": (np.int64, record.spans, 2),
            "runs": (np.int64, record.runs, 2),
            "sources": (np.uint8, record.sources, 1),
        }
        if record.keys:
            shapes["keys"] = (key_type(config), record.rows, config.dim)
        sums = self._sums(shapes, dropped=not record.keys)
        columns: dict[str, Column] = {}
        for name, (dtype, rows, width) in shapes.items():
            count = blocks_of(rows, np.dtype(dtype).itemsize * width)
            columns[name] = Column(file_of(folder, record.file, name), dtype, rows, width, sums[:count])
            sums = sums[count:]
        self.values, self.positions = columns["values"], columns["positions"]
        self.keys = columns.get("keys")
        self._spans, self._runs, self._sources = columns["spans"], columns["runs"], columns["sources"]

    def _sums(self, shapes: dict[str, tuple[Any, int, int]], dropped: bool) -> NDArray[np.uint64]:
        """The checksums of all blocks; those of dropped keys may follow."""
        count = sum(blocks_of(rows, np.dtype(dtype).itemsize * width) for dtype, rows, width in shapes.values())
        path = file_of(self._folder, self.record.file, "sums")
        size = path.stat(follow_symlinks=False).st_size // 8
        if size < count or (size > count and not dropped):
            raise DamagedError(f"{path} has {size} checksums where {count} belong: it was cut short or exchanged")
        if size > 1 << 32:
            raise DamagedError(f"{path} is too large for checksums")
        found = np.array(Column(path, np.uint64, size, 1, np.zeros(0, np.uint64)).unchecked(), np.uint64)
        if xxhash.xxh3_128_hexdigest(found.tobytes()) != self.record.checksum:
            raise DamagedError(f"{path} is damaged: copy it back from a backup, or build the store again")
        return found

    @cached_property
    def sources(self) -> list[Source]:
        """The documents that rows refer to."""
        text = bytes(self._sources.part(0, self._sources.rows))
        try:
            found = [Source(*map(_text, json.loads(line))) for line in text.decode().split("\n")[:-1]]
        except (ValueError, TypeError, RecursionError):
            raise DamagedError(f"{self._sources.path} does not list documents") from None
        return found

    @cached_property
    def spans(self) -> NDArray[np.int64]:
        """(first row, source)."""
        return self._pairs(self._spans, len(self.sources))

    @cached_property
    def runs(self) -> NDArray[np.int64]:
        """(first row, first id)."""
        return self._pairs(self._runs, 1 << 62)

    def _pairs(self, column: Column, highest: int) -> NDArray[np.int64]:
        pairs = np.array(column.part(0, column.rows), np.int64)
        rows, numbers = pairs[:, 0], pairs[:, 1]
        if rows[0] != 0 or rows[-1] >= self.rows or (np.diff(rows) <= 0).any():
            raise DamagedError(f"{column.path}: its rows are out of order")
        if numbers.min() < 0 or numbers.max() >= highest:
            raise DamagedError(f"{column.path}: its numbers are out of range")
        return pairs

    def sources_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the document of each row."""
        return self.spans[np.searchsorted(self.spans[:, 0], rows, "right") - 1, 1]

    def ids_of(self, rows: NDArray[np.int64]) -> Ids:
        """The id of each row."""
        run = np.searchsorted(self.runs[:, 0], rows, "right") - 1
        return self.runs[run, 1] + rows - self.runs[run, 0]

    def matching(self, wanted: Callable[[Source], bool]) -> NDArray[np.bool_]:
        """Which rows refer to documents that are wanted."""
        met = np.array([wanted(source) for source in self.sources], np.bool_)
        lengths = np.diff(np.r_[self.spans[:, 0], self.rows])
        return np.repeat(met[self.spans[:, 1]], lengths)

    def columns(self) -> Iterator[Column]:
        """All of its files, for those who check them."""
        yield from (self.values, self.positions, self._spans, self._runs, self._sources)
        if self.keys is not None:
            yield self.keys


def groups(segments: list[Segment], most: int) -> list[list[Segment]]:
    """Neighbours that fit into one segment together; those with keys and those without stay apart."""
    found: list[list[Segment]] = []
    for segment in segments:
        last = found[-1] if found else []
        together = last and (last[0].keys is None) == (segment.keys is None)
        if together and sum(one.rows for one in last) + segment.rows <= most:
            last.append(segment)
        else:
            found.append([segment])
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
