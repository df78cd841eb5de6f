"""The disk store: what is written when, and in which order, so that nothing is ever lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.files import TEMPORARY, clear_os_errors, fsync, lock, remove_unfinished
from mnemic.stores.base import Floats, Found, Ids, LookedUp, References, Rows, Store, Summary, Where
from mnemic.stores.config import StoreConfig, without_names
from mnemic.stores.disk import indexing
from mnemic.stores.disk import manifest as manifests
from mnemic.stores.disk.columns import in_type
from mnemic.stores.disk.index import pair_scores
from mnemic.stores.disk.manifest import Manifest, SegmentRecord
from mnemic.stores.disk.opening import files_of, open_version
from mnemic.stores.disk.ranges import joined, ranges_of
from mnemic.stores.disk.segments import Segment, SegmentWriter, groups, remove
from mnemic.stores.disk.snapshot import Snapshot

SMALL = 1 << 16  # rows up to which segments are merged as they come
MERGED = 1 << 24  # rows up to which `compact` puts them together

_FILE = re.compile(r"(?:rows|index)-(\d{8})\.[a-z]+")


class DiskStore(Store):
    """A store in a folder. From its first change until it is closed, nobody else can write to it."""

    def __init__(self, address: str, config: StoreConfig | None = None, *, version: int | None = None) -> None:
        self.address = address
        self.folder = Path(address.removeprefix("disk:"))
        self._holding, self._held = contextlib.ExitStack(), False
        self._fixed = version is not None
        self._writer: SegmentWriter | None = None
        self._deleted: list[tuple[int, int]] = []
        self._publishing = False  # whether a new manifest may have been written
        if not self._is_store():
            if config is None:
                raise UsageError(
                    f"no store at {self.folder}: build one with `mnemic store build`, or give its settings"
                )
            self._create(config)
        self._snapshot = open_version(self.folder, version)
        self.config = self._snapshot.config

    def _is_store(self) -> bool:
        """Whether the folder holds a manifest."""
        try:
            return bool(manifests.versions(self.folder))
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            raise UsageError(f"{self.folder} is a file: a store is a folder") from None
        except OSError as error:
            raise MnemicError(f"{self.folder} cannot be read: {error.strerror}") from None

    def _create(self, config: StoreConfig) -> None:
        """Writes version 0, which has no rows."""
        indexing.check(config)
        with clear_os_errors(self.folder):
            new = [self.folder, *(one for one in self.folder.absolute().parents if not one.exists())]
            self.folder.mkdir(parents=True, exist_ok=True)
        foreign = [name for name in os.listdir(self.folder) if name != "lock" and not name.startswith(TEMPORARY)]
        if foreign and not self._is_store():
            raise UsageError(f"{self.folder} has files that are no store's: give another folder")
        self._hold()
        try:
            if not self._is_store():
                for folder in new:
                    fsync(folder.parent)
                manifests.write(self.folder, Manifest(0, config))
        finally:
            self._let_go()

    # Reading

    @property
    def version(self) -> int:
        """The version that searches see."""
        return self._snapshot.manifest.version

    @property
    def next_id(self) -> int:
        return self._snapshot.manifest.next_id

    def __len__(self) -> int:
        return len(self._snapshot)

    def _search(self, queries: Floats, k: int, where: Where, recall: float) -> Found:
        return self._snapshot.search(queries, k, where, recall)

    def _look_up(self, ids: Ids, where: Where) -> LookedUp:
        selection, _ = self._snapshot.selection(where)
        there = self._snapshot.locate(ids)[0] >= 0
        if selection is not None:
            there[there] = selection[ids[there]]
        ids = ids[there]
        return LookedUp(there, in_type(self._snapshot.keys_of(ids), np.float32), self._snapshot.values_of(ids))

    def _compare(self, queries: Floats, asking: Ids, keys: NDArray[Any], which: Ids) -> Floats:
        return pair_scores(self.config, queries, asking, keys, which)

    def _get(self, ids: Ids) -> Rows:
        return self._snapshot.get(ids)

    def refresh(self) -> int:
        self._check_open()
        try:
            newest = manifests.versions(self.folder)[-1]
        except (OSError, IndexError):
            raise DamagedError(f"{self.folder} is gone or empty: the store was moved or removed") from None
        if not self._fixed and newest != self.version:
            self._turn_to(open_version(self.folder, known=self._snapshot))
        return self.version

    def _turn_to(self, snapshot: Snapshot) -> None:
        self._snapshot.close()
        self._snapshot = snapshot

    def summary(self) -> Summary:
        manifest, namespaces, documents = self._snapshot.manifest, dict[str, int](), set()
        selection, _ = self._snapshot.selection(Where())
        for segment in self._snapshot.segments:
            rows = np.arange(segment.rows)
            if selection is not None:
                rows = rows[selection[segment.ids_of(rows)]]
            used, times = np.unique(segment.sources_of(rows), return_counts=True)
            for number, count in zip(used.tolist(), times.tolist(), strict=True):
                source = segment.sources[number]
                documents.add(source)
                namespaces[source.namespace] = namespaces.get(source.namespace, 0) + count
        record, index = manifest.index, dict[str, Any](kind="exact", recall=1.0, rows=0)
        if record is not None:
            measured = max(step[2] for step in record.curve)
            index = {"kind": record.factory, "recall": measured, "rows": record.rows, "curve": record.curve}
        counts = (len(self), len(documents), dict(sorted(namespaces.items())))
        return Summary(self.address, self.version, *counts, self.config, index, self._snapshot.bytes)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Reads every byte of this version; what is wrong, one sentence each."""
        checks: list[Callable[[], object]] = [self._snapshot.check_index]
        for segment in self._snapshot.segments:
            checks += [lambda column=column: column.check_all(anew=True) for column in segment.columns()]  # type: ignore[misc]
            checks += [lambda segment=segment: (segment.spans, segment.runs)]  # type: ignore[misc]
        checks.append(lambda: self._snapshot.locate(np.zeros(1, np.int64)))
        problems = []
        for done, check in enumerate(checks, 1):
            try:
                check()
            except DamagedError as error:
                problems.append(str(error))
            if progress is not None:
                progress(done, len(checks))
        return problems

    # Writing

    def _hold(self) -> None:
        """Takes the lock, then looks at what is there; what a killed writer left is removed."""
        self._holding.enter_context(lock(self.folder / "lock", f"the store {self.folder}"))
        self._held = True
        remove_unfinished(self.folder)

    def _let_go(self) -> None:
        self._holding.close()
        self._held = False

    def _begin(self) -> None:
        self._check_open()
        if self._fixed:
            raise UsageError(f"{self.folder} was opened at version {self.version}: open the newest one to write")
        if self._held:
            self._catch_up()
            return
        self._hold()
        try:
            self.refresh()
            self._remove_unpublished()
        except BaseException:
            self._let_go()
            raise

    def _remove_unpublished(self) -> None:
        """Removes files that no version needs and nobody is writing to."""
        pending = self._writer.number if self._writer is not None else None
        for name in os.listdir(self.folder):
            found = _FILE.fullmatch(name)
            if found and int(found[1]) >= self._snapshot.manifest.next_file and int(found[1]) != pending:
                self._remove(name)

    @contextlib.contextmanager
    def _tidy(self) -> Iterator[None]:
        """Leaves nothing of what fails: a full disk shall not get fuller."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._catch_up()
                self._remove_unpublished()
            raise

    def _catch_up(self) -> None:
        """Turns to what a commit published that was broken off right after; nothing of it is pending any more."""
        if self._publishing:
            if manifests.versions(self.folder)[-1] != self.version:
                self._turn_to(open_version(self.folder, known=self._snapshot))
                self._nothing_pending()
            self._publishing = False

    def _nothing_pending(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._deleted = None, []

    def _add(self, keys: Floats, values: NDArray[np.int64], references: References) -> Ids:
        self._begin()
        manifest = self._snapshot.manifest
        if self._writer is None:
            self._writer = SegmentWriter(self.folder, manifest.next_file, self.config)
        ids = np.arange(len(keys)) + manifest.next_id + self._writer.rows
        self._writer.append(keys, values, references.positions, references.sources, references.which, ids)
        return ids

    def _delete(self, where: Where) -> int:
        self._begin()
        before, next_id = self._marked(), self._snapshot.manifest.next_id
        selection, _ = self._snapshot.selection(where)
        mask = np.zeros(self._snapshot.end, np.bool_)
        if selection is not None:
            mask[:] = selection
        else:
            for segment in self._snapshot.segments:
                mask[segment.ids_of(np.arange(segment.rows))] = True
        ranges = ranges_of(mask)
        if self._writer is not None and self._writer.rows:
            pending = ranges_of(self._writer.matching(where.__contains__))
            ranges += [(first + next_id, end + next_id) for first, end in pending]
        self._deleted = joined([*self._deleted, *ranges])
        return self._marked() - before

    def _marked(self) -> int:
        return sum(end - first for first, end in self._deleted)

    def commit(self, index: bool = True) -> int:
        self._check_open()
        self._catch_up()
        if self._writer is None and not self._deleted:
            if index and not self._fixed and indexing.due(self._snapshot):
                self._begin()
                with self._tidy():
                    self._update_index()
            return self.version
        with self._tidy():
            self._commit_rows()
            if index:
                self._update_index()
        return self.version

    def _commit_rows(self) -> None:
        manifest = self._snapshot.manifest
        segments, number, next_id = list(manifest.segments), manifest.next_file, manifest.next_id
        if self._writer is not None and self._writer.rows:
            next_id += self._writer.rows
            segments, number = self._merged(segments, self._writer.finish())
        deleted = joined([*((first, first + count) for first, count in manifest.deleted), *self._deleted])
        fsync(self.folder)
        self._publish(
            segments=segments,
            next_file=number + 1,
            next_id=next_id,
            deleted=[[first, end - first] for first, end in deleted],
        )
        for merged in range(manifest.next_file, number):  # into the segment of that number; no version ever had them
            remove(self.folder, merged)

    def _publish(self, **changes: Any) -> None:
        """Writes the next manifest and turns to it."""
        self._publishing = True
        manifests.write(self.folder, self._snapshot.manifest.replaced(**changes))
        self._turn_to(open_version(self.folder, known=self._snapshot))
        self._nothing_pending()
        self._publishing = False

    def _merged(self, segments: list[SegmentRecord], new: SegmentRecord) -> tuple[list[SegmentRecord], int]:
        """The segments with the new one, which takes in small ones before it that are no longer than itself."""
        taken, rows = len(segments), new.rows
        while taken and segments[taken - 1].rows <= rows and rows + segments[taken - 1].rows <= SMALL:
            taken -= 1
            rows += segments[taken].rows
        if taken == len(segments) or not all(record.keys for record in segments[taken:]):
            return [*segments, new], new.file
        with SegmentWriter(self.folder, new.file + 1, self.config) as writer:
            for segment in [*self._snapshot.segments[taken:], Segment(self.folder, new, self.config)]:
                writer.copy(segment)
            return [*segments[:taken], writer.finish()], writer.number

    def _update_index(self, anew: bool = False, progress: Callable[[int, int], None] | None = None) -> None:
        """Makes the index anew, or puts new rows into it, if it is time."""
        manifest = self._snapshot.manifest
        record = indexing.updated(self._snapshot, manifest.next_file, progress, anew)
        if record is None:
            return
        segments = manifest.segments
        if self.config.keys == "codes":  # from now on the index holds the keys
            segments = [SegmentRecord(**{**vars(one), "keys": False}) for one in segments]
        fsync(self.folder)
        self._publish(index=record, next_file=record.file + 1, segments=segments)
        if self.config.keys == "codes":
            self._forget_the_past()

    def compact(self, progress: Callable[[int, int], None] | None = None, rebuild: bool = False) -> int:
        self._begin()
        with self._tidy():
            self.commit(index=False)
            self._rewrite(progress)
            self._update_index(anew=rebuild, progress=progress)
            self._forget_the_past()
        return self.version

    def _rewrite(self, progress: Callable[[int, int], None] | None) -> None:
        """Publishes a version without deleted rows."""
        manifest = self._snapshot.manifest
        segments, number = self._rewritten(progress)
        index = manifest.index
        if index is not None and any(first < index.end for first, _ in manifest.deleted):
            index = None
            if self.config.keys == "codes":
                index = indexing.without_deleted(self._snapshot, number)
                number += 1
        if manifest.deleted or segments != manifest.segments:
            fsync(self.folder)
            config = without_names(manifest.config, self._snapshot.forgotten_names())
            self._publish(segments=segments, deleted=[], index=index, next_file=number, config=config)
            self.config = dataclasses.replace(config, recall=self.config.recall)

    def _rewritten(self, progress: Callable[[int, int], None] | None) -> tuple[list[SegmentRecord], int]:
        """The segments without deleted rows, small ones put together, and the next number for a file."""
        selection, _ = self._snapshot.selection(Where())
        number, done, records = self._snapshot.manifest.next_file, 0, []
        for group in groups(self._snapshot.segments, MERGED):
            keep = [None if selection is None else selection[one.ids_of(np.arange(one.rows))] for one in group]
            if len(group) == 1 and (keep[0] is None or keep[0].all()):
                records.append(group[0].record)
            else:
                with SegmentWriter(self.folder, number, self.config, keys=group[0].keys is not None) as writer:
                    for segment, kept in zip(group, keep, strict=True):
                        writer.copy(segment, kept)
                    if writer.rows:
                        records.append(writer.finish())
                        number += 1
            done += sum(segment.rows for segment in group)
            if progress is not None:
                progress(done, sum(segment.rows for segment in self._snapshot.segments))
        return records, number

    def _forget_the_past(self) -> None:
        """Removes older versions and all files that only they needed."""
        for version in manifests.versions(self.folder):
            if version < self.version:
                self._remove(manifests.path_of(self.folder, version).name)
        fsync(self.folder)
        needed = {path.name for path in files_of(self.folder, self._snapshot.manifest)}
        for name in os.listdir(self.folder):
            if _FILE.fullmatch(name) and name not in needed:
                self._remove(name)
        fsync(self.folder)

    def _remove(self, name: str) -> None:
        with clear_os_errors(self.folder / name):
            (self.folder / name).unlink()

    def _drop_pending(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        self._writer, self._deleted = None, []

    def _close(self) -> None:
        self._drop_pending()
        self._snapshot.close()
        self._let_go()
