"""The store on a Milvus server: what is written when, and in which order, so that nothing is ever half there.

A store is one collection. Its rows are in one partition; in a second one, each document and namespace has a row that
gives it a number and holds its name. Rows refer to both by number, so that no name is ever part of a question.

The manifest, a property of the collection, says what is committed: rows and names below certain numbers. A commit
  1. puts its mark into the manifest, and removes what another one that was killed has left behind,
  2. writes names and rows with higher numbers, which no search shows,
  3. counts what arrived, and replaces the manifest: the new version is there, whole, in this one step,
  4. removes deleted rows, which the manifest lists so that no search shows them, then empties that list.
Whoever is killed before 3 has changed nothing; after it, the next commit carries on with 4.

There is no lock: Milvus has none. Who begins second takes over, and the first, which looks for its mark before each
request that writes, is told and stops. Only between that look and the request, a few thousandths of a second, can both
write, and what they wrote be mixed.
"""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.stores.base import Floats, Found, Ids, LookedUp, References, Rows, Store, Summary, Where
from mnemic.stores.config import StoreConfig
from mnemic.stores.milvus.index import check, choose, enough_lists
from mnemic.stores.milvus.manifest import Manifest
from mnemic.stores.milvus.names import Meant, id_of
from mnemic.stores.milvus.server import MESSAGE_BYTES, ROWS, UNSETTLED, Server, both
from mnemic.stores.milvus.snapshot import Snapshot

WAITING_BYTES = 256 << 20  # of keys that are kept here; beyond that they go to the server, which shows them to no one


@dataclass(frozen=True)
class Waiting:
    """Rows that were added and are not on the server yet."""

    ids: Ids
    keys: Floats
    values: NDArray[np.int64]
    references: References

    def without(self, where: Where) -> Waiting:
        """The same without the rows that are meant."""
        references = self.references
        met = np.array([source in where for source in references.sources], np.bool_)
        left = ~met[references.which]
        references = References(references.sources, references.which[left], references.positions[left])
        return Waiting(self.ids[left], self.keys[left], self.values[left], references)


class MilvusStore(Store):
    """Rows on a Milvus server. It keeps keys as float32; `keys="float16"` only rounds them.

    token: "user:password", if the server asks for one. timeout: seconds after which a request is given up.

    The index is exact up to 65,536 rows. Then it has lists (IVF), since these can be searched exactly as well: for
    recall=1.0, and whenever a search is confined. A reader that has not called `refresh` sees no new rows; deleted ones
    leave its results while they are being removed. How many bytes the server uses it does not tell: `summary` says 0.
    """

    def __init__(
        self, address: str, config: StoreConfig | None = None, *, token: str = "", timeout: float = 60.0
    ) -> None:
        self.address = address
        self._server = Server(address, token, timeout)
        self._mark = uuid.uuid4().hex
        try:
            if self._server.manifest() is None:
                if config is None:
                    raise UsageError(
                        f"no store at {address}: build one with `mnemic store build`, or give its settings"
                    )
                check(config)
                self._server.create(config, Manifest(config, index=choose(config, 0)).text())
            manifest = self._read()
            self._server.prepare(manifest.config, manifest.index)
        except BaseException:
            self._server.close()
            raise
        self.config = manifest.config
        self._begun = False
        self._turn_to(manifest)

    def _turn_to(self, manifest: Manifest) -> None:
        """Goes on from this version, with nothing waiting."""
        self._manifest = manifest
        self._snapshot = Snapshot(self._server, manifest)
        self._waiting: list[Waiting] = []
        self._waiting_bytes = 0
        self._next = manifest.next_id
        self._written = self._deleted = 0  # rows of the next version that are on the server
        self._changed = self._unsure = False

    def _read(self) -> Manifest:
        text = self._server.manifest()
        if text is None:
            raise MnemicError(f"{self.address} is gone: someone has dropped its collection")
        try:
            return Manifest.parse(text)
        except DamagedError as error:
            raise DamagedError(f"the manifest of {self.address} cannot be used: {error}") from None

    # Reading

    @property
    def version(self) -> int:
        """The version that searches see."""
        return self._manifest.version

    @property
    def next_id(self) -> int:
        """The number that the first row after this version gets."""
        return self._manifest.next_id

    def __len__(self) -> int:
        return self._manifest.rows

    def _search(self, queries: Floats, k: int, where: Where, recall: float) -> Found:
        return self._snapshot.search(queries, k, where, recall)

    def _look_up(self, ids: Ids, where: Where) -> LookedUp:
        return self._snapshot.look_up(ids, where)

    def _get(self, ids: Ids) -> Rows:
        return self._snapshot.get(ids)

    def refresh(self) -> int:
        newest = self._read()
        if self._changed and newest.version != self.version:
            raise self._overtaken(newest)
        if not self._changed:
            self._turn_to(newest)
        return self.version

    def summary(self) -> Summary:
        curve, recall = self._manifest.curve, 1.0
        lists = enough_lists(curve, self.config.recall)
        for number, measured in curve:
            recall = measured if number == lists else recall
        index = {"kind": self._manifest.index, "recall": recall, "rows": self._manifest.settled}
        namespaces = {name: rows for name, rows in self._snapshot.namespaces().items() if rows}
        documents = self._snapshot.names.documents()
        return Summary(self.address, self.version, len(self), documents, namespaces, self.config, index)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        return self._snapshot.verify(progress)

    def _close(self) -> None:
        self._waiting = []
        self._server.close()

    # Writing

    def _add(self, keys: Floats, values: NDArray[np.int64], references: References) -> Ids:
        if self.config.keys == "float16":
            keys = keys.astype(np.float16).astype(np.float32)
        ids = np.arange(self._next, self._next + len(keys))
        self._waiting.append(Waiting(ids, keys.copy(), values, references))
        self._next += len(keys)
        self._changed = True
        self._waiting_bytes += keys.nbytes
        if self._waiting_bytes > WAITING_BYTES:
            self._begin()
            self._write()
        return ids

    def _delete(self, where: Where) -> int:
        left = [waiting.without(where) for waiting in self._waiting]
        met = sum(len(waiting.ids) for waiting in self._waiting) - sum(len(waiting.ids) for waiting in left)
        names = self._snapshot.names
        meant = names.meant(where)
        if meant:
            end = self._next if self._begun else self.next_id
            rows = both(meant.filter(), names.alive(committed=False), f"id < {end}")
            there = self._server.count(rows, ROWS, 0 if self._begun else self._manifest.time)
            names.doom(meant)
            self._deleted += there
            met += there
        self._waiting = left
        self._changed = self._changed or met > 0
        return met

    def commit(self, index: bool = True) -> int:
        """Makes what was added and deleted visible, and as durable as the server's log is; returns the version.

        `index` also takes new rows into the index if they are many, which takes some seconds, and measures its recall.
        """
        if self._changed or (index and self._due()):
            self._begin()
            if self._changed:
                self._commit()
            self._purge()
            if index:
                self._settle()
            self._end()
        return self.version

    def _begin(self) -> None:
        """Step 1: puts our mark into the manifest, and removes what one that was killed has left behind."""
        if self._begun:
            return
        there = self._read()
        if there.version != self.version:
            raise self._overtaken(there)
        self._server.publish(dataclasses.replace(there, writer=self._mark).text())
        self._server.time, removed = None, 0
        if there.writer:
            removed = self._server.remove(_beyond(there), 0, self._check_mark)
        self._manifest = dataclasses.replace(there, writer=self._mark, deleted=there.deleted + removed)
        self._begun = True

    def _end(self) -> None:
        self._publish(writer="")
        self._begun = False
        self._turn_to(self._manifest)

    def _check_mark(self) -> None:
        """Refuses to go on if another process has begun to write."""
        there = self._read()
        if there.writer != self._mark:
            raise self._overtaken(there)

    def _publish(self, **changes: Any) -> None:
        """Replaces the manifest, while it has our mark."""
        self._check_mark()
        if self._server.time is not None:
            changes["time"] = self._server.time
        changed = dataclasses.replace(self._manifest, **changes)
        self._server.publish(changed.text())
        self._manifest = changed

    def _overtaken(self, there: Manifest) -> MnemicError:
        did = "has begun to write" if there.version == self.version else f"has committed version {there.version}"
        return MnemicError(
            f"another process {did} while this one was at version {self.version} of {self.address}, and what this one "
            "added or deleted since is lost: let one process write at a time, open the store again and repeat it"
        )

    def _write(self) -> None:
        """Step 2: sends what waits, under numbers that no search shows yet."""
        try:
            sources = (
                waiting.references.sources[number]
                for waiting in self._waiting
                for number in np.unique(waiting.references.which).tolist()
            )
            self._snapshot.names.write(sources, self._unsure, self._check_mark)
            while self._waiting:
                for rows in self._rows(self._waiting[0]):
                    self._server.write(rows, ROWS, self._unsure, self._check_mark)
                self._written += len(self._waiting.pop(0).ids)
            self._waiting_bytes = 0
        except BaseException:
            self._unsure = True  # some of it may have arrived
            raise

    def _rows(self, waiting: Waiting) -> Iterator[list[dict[str, Any]]]:
        """What waits as Milvus takes it, in parts of about a message."""
        names, sources = self._snapshot.names, waiting.references.sources
        which = waiting.references.which.tolist()
        places = {number: names.place(sources[number]) for number in set(which)}
        columns = (waiting.ids.tolist(), waiting.values.tolist(), waiting.references.positions.tolist())
        step = max(1, MESSAGE_BYTES // (4 * self.config.dim + 64))
        fields = ("key", "id", "value", "position", "source", "space", "name")
        rows = (
            dict(zip(fields, (*row, *places[number], ""), strict=True))
            for *row, number in zip(waiting.keys, *columns, which, strict=True)
        )
        while part := [*itertools.islice(rows, step)]:
            yield part

    def _commit(self) -> None:
        """Steps 2 and 3: writes, counts, and makes the next version."""
        self._write()
        manifest, names = self._manifest, self._snapshot.names
        sent = self._written + names.next - manifest.next_name
        arrived = self._server.count(_beyond(manifest)) if sent else 0
        if arrived != sent:
            raise MnemicError(
                f"{sent} rows were sent to {self.address} and {arrived} are there, so another process may be writing. "
                "Nothing was committed: open the store again and repeat it"
            )
        self._publish(
            version=manifest.version + 1,
            next_id=self._next,
            next_name=names.next,
            rows=manifest.rows + self._written - self._deleted,
            deleted=manifest.deleted + self._deleted,
            dead_spaces=sorted(names.doomed.spaces),
            dead_sources=sorted(names.doomed.sources),
        )
        self._turn_to(self._manifest)

    def _purge(self) -> None:
        """Step 4: removes what is deleted."""
        dead = self._snapshot.names.dead
        if dead:
            self._server.remove(dead.filter(), self.next_id, self._check_mark)
            self._snapshot.names.tell_time(self._check_mark)
            self._publish(dead_spaces=[], dead_sources=[])
            self._turn_to(self._manifest)

    def _due(self) -> bool:
        """Whether rows wait for the index, or deleted ones to be removed."""
        manifest = self._manifest
        other = choose(self.config, len(self), manifest.index) != manifest.index
        return other or manifest.next_id - manifest.settled > UNSETTLED or bool(self._snapshot.names.dead)

    def _settle(self, anew: bool = False) -> None:
        """Takes new rows into the index if they are many, and measures its recall if they have changed it much."""
        index = choose(self.config, len(self), self._manifest.index)
        if anew or index != self._manifest.index:
            self._publish(index=index, settled=0, curve=[], measured=0)
        if anew or self.next_id - self._manifest.settled > UNSETTLED:
            self._server.settle(self.config, index, anew)
            self._publish(settled=self.next_id)
            if index != "exact" and len(self) > 2 * self._manifest.measured:
                curve = Snapshot(self._server, self._manifest).curve()
                self._publish(curve=curve, measured=len(self))

    def compact(self, progress: Callable[[int, int], None] | None = None, rebuild: bool = False) -> int:
        """Commits, drops the names of empty namespaces, and has Milvus rewrite its segments without deleted rows.

        `rebuild` makes the index anew as well; for some seconds, searches wait.

        When this returns, no live segment of the collection holds a deleted row. Milvus keeps the old segments' files
        until its garbage collector passes (`dataCoord.gc`: every hour, and three hours after they were dropped, unless
        the server is set otherwise), and the messages that brought the rows until its log lets go of them (`rocksmq` or
        the server's own broker: three days). Until then, deleted text is in the server's files, though no one finds it.
        """
        self.commit()
        empty = self._snapshot.names.empty_spaces()
        if empty:
            self._snapshot.names.doom(Meant(empty, set()))
            self._changed = True
            self.commit(index=False)
        if self._manifest.deleted or rebuild:
            self._begin()
            self._server.compact()
            self._publish(deleted=0)
            if rebuild:
                self._settle(anew=True)
            self._end()
        if progress is not None:
            progress(len(self), len(self))
        return self.version


def _beyond(manifest: Manifest) -> str:
    """The filter for rows and names that are not committed."""
    return f"id >= {manifest.next_id} or id <= {id_of(manifest.next_name)}"
