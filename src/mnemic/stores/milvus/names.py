"""The numbers under which a store on Milvus keeps its documents and namespaces, and which of them are deleted.

A name is a row of its own, with a negative id: -2 for the name of number 0, -3 for that of 1. Rows and names are
deleted by these numbers, which are never given again: a document that was deleted and comes back gets another one.

The row with the id -1 is a clock. Searches wait until they see all that happened up to some time of the server. It
tells that time to those who write rows and not to those who delete, so these write this row afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mnemic.errors import UsageError
from mnemic.stores.base import Source, Where
from mnemic.stores.milvus.manifest import Manifest
from mnemic.stores.milvus.server import NAMES, PAGE, Server, both, one_of

NAMESPACE, DOCUMENT, CLOCK = 0, 1, 2  # the value of such a row
MOST_DELETED = 50_000  # documents in one commit: the manifest lists them, and a property has its limits
ASKED_AT_ONCE = 1 << 19  # characters of a filter
REMEMBERED = 100_000


class Meant(NamedTuple):
    """Numbers of namespaces and of single documents."""

    spaces: set[int]
    sources: set[int]

    def __bool__(self) -> bool:
        return bool(self.spaces or self.sources)

    def filter(self) -> str:
        """The filter for the rows and the names of these."""
        return f"({' or '.join(self._parts())})"

    def exclude(self) -> str:
        """The filter for all others."""
        return both(*(f"not ({part})" for part in self._parts()))

    def _parts(self) -> list[str]:
        return [
            one_of(field, numbers) for field, numbers in (("space", self.spaces), ("source", self.sources)) if numbers
        ]


class Names:
    """What searches see (`committed`) and what the next commit will see."""

    def __init__(self, server: Server, manifest: Manifest) -> None:
        self._server, self._manifest = server, manifest
        self.next = manifest.next_name
        self.dead = Meant(set(manifest.dead_spaces), set(manifest.dead_sources))  # for searches
        self.doomed = Meant(set(self.dead.spaces), set(self.dead.sources))  # for the next commit
        self._places: dict[Source, tuple[int, int]] = {}
        self._filters: dict[Where, str | None] = {}
        self._texts: dict[int, str] = {}

    def alive(self, committed: bool = True) -> str:
        """The filter that leaves out what is deleted."""
        return (self.dead if committed else self.doomed).exclude()

    # Looking up

    def filter(self, where: Where) -> str | None:
        """The filter for the rows a search is confined to; None if there can be none, "" for all."""
        if where.everything:
            return ""
        if where not in self._filters:
            if len(self._filters) >= PAGE:
                self._filters = {}
            meant = self._meant(where, committed=True)
            self._filters[where] = meant.filter() if meant else None
        return self._filters[where]

    def meant(self, where: Where) -> Meant:
        """What a deletion is about."""
        meant = self._meant(where, committed=False)
        if sum(map(len, self.doomed)) + sum(map(len, meant)) > MOST_DELETED:
            raise UsageError(
                f"more than {MOST_DELETED} documents to delete in one commit: commit in between, or delete a namespace"
            )
        return meant

    def _meant(self, where: Where, committed: bool) -> Meant:
        confined = ""
        if where.namespaces is not None or where.documents is None:
            spaces = set(self._spaces(where.namespaces, committed).values())
            if where.documents is None or not spaces:
                return Meant(spaces, set())
            confined = one_of("space", spaces)
        found = self._named(DOCUMENT, where.documents, committed, confined)
        return Meant(set(), {number for _, _, number in found})

    def spaces(self) -> dict[str, int]:
        """The number of each namespace."""
        return self._spaces(None, committed=True)

    def empty_spaces(self) -> set[int]:
        """The numbers of the namespaces that have no document, as many as one commit can delete."""
        used = {space for _, space, _ in self._named(DOCUMENT, None, committed=True)}
        return {*sorted(set(self.spaces().values()) - used)[:MOST_DELETED]}

    def _spaces(self, names: Collection[str] | None, committed: bool) -> dict[str, int]:
        return {name: number for name, _, number in self._named(NAMESPACE, names, committed)}

    def documents(self) -> int:
        """How many documents there are."""
        rows = both(f"value == {DOCUMENT}", self._known(committed=True))
        return self._server.count(rows, NAMES, self._manifest.time)

    def _known(self, committed: bool) -> str:
        return both(f"id > {id_of(self._manifest.next_name if committed else self.next)}", self.alive(committed))

    def _named(
        self, kind: int, names: Collection[str] | None, committed: bool, confined: str = ""
    ) -> Iterator[tuple[str, int, int]]:
        """Name, number of its namespace and own number of those with these names, or of all."""
        since = self._manifest.time if committed or self._server.time is None else self._server.time
        for names_in in _portions(names):
            rows = both(f"value == {kind}", names_in, confined, self._known(committed))
            for page in self._server.pages(rows, ("name", "space", "source"), NAMES, since):
                for row in page:
                    yield bytes.fromhex(row["name"]).decode(), row["space"], row["source"]

    def sources(self, spaces: dict[int, int]) -> dict[int, Source]:
        """The documents of these numbers (with the numbers of their namespaces), those that have a name."""
        unknown = sorted({*spaces.keys(), *spaces.values()} - self._texts.keys())
        if len(self._texts) > REMEMBERED:
            self._texts, unknown = {}, sorted({*spaces.keys(), *spaces.values()})
        for start in range(0, len(unknown), PAGE):
            rows = one_of("id", map(id_of, unknown[start : start + PAGE]))
            for page in self._server.pages(rows, ("name", "source"), NAMES, self._manifest.time):
                self._texts |= {row["source"]: bytes.fromhex(row["name"]).decode() for row in page}
        texts = self._texts
        return {
            source: Source(texts[source], texts[space])
            for source, space in spaces.items()
            if source in texts and space in texts
        }

    # Changing

    def doom(self, meant: Meant) -> None:
        """Marks as deleted, from the next commit on."""
        self.doomed.spaces.update(meant.spaces)
        self.doomed.sources.update(meant.sources)
        self._places = {}

    def write(self, sources: Iterable[Source], again: bool, before: Callable[[], None]) -> None:
        """Gives a number to each document that has none; `again` after a try that failed."""
        new = [source for source in dict.fromkeys(sources) if source not in self._places]
        if not new:
            return
        number, rows = self.next, []
        spaces = self._spaces({source.namespace for source in new}, committed=False)
        known = {(name, space): at for name, space, at in self._documents(new, spaces)}
        places = {}
        for source in new:
            if source.namespace not in spaces:
                spaces[source.namespace] = number
                rows.append(self._row(NAMESPACE, source.namespace, number, number))
                number += 1
            space = spaces[source.namespace]
            if (source.document, space) not in known:
                known[source.document, space] = number
                rows.append(self._row(DOCUMENT, source.document, space, number))
                number += 1
            places[source] = (known[source.document, space], space)
        self._server.write(rows, NAMES, again, before)
        self.next = number
        self._places |= places

    def _documents(self, sources: list[Source], spaces: dict[str, int]) -> Iterator[tuple[str, int, int]]:
        if not spaces:
            return iter(())
        names = {source.document for source in sources if source.namespace in spaces}
        return self._named(DOCUMENT, names, committed=False, confined=one_of("space", spaces.values()))

    def _row(self, kind: int, name: str, space: int, number: int) -> dict[str, object]:
        key = np.zeros(self._manifest.config.dim, np.float32)
        row = {"id": id_of(number), "key": key, "value": kind, "position": 0, "source": number, "space": space}
        return {**row, "name": _hexadecimal(name)}

    def tell_time(self, before: Callable[[], None]) -> None:
        """Writes the clock, after something was deleted."""
        self._server.write([self._row(CLOCK, "", -1, -1)], NAMES, True, before)

    def place(self, source: Source) -> tuple[int, int]:
        """The numbers of a document and of its namespace, both written."""
        return self._places[source]


def id_of(number: int) -> int:
    """The id of a name."""
    return -2 - number


def _hexadecimal(text: str) -> str:
    """A name as it is stored and asked for: no character of it can be mistaken for a part of a filter."""
    return text.encode().hex()


def _portions(names: Collection[str] | None) -> Iterator[str]:
    """The filters for these names, as many in each as fit into a request; one filter for all if they are None."""
    if names is None:
        yield ""
        return
    portion, length = list[str](), 0
    for name in sorted(names):
        portion.append(f'"{_hexadecimal(name)}"')
        length += len(portion[-1])
        if length > ASKED_AT_ONCE:
            yield f"name in [{','.join(portion)}]"
            portion, length = [], 0
    if portion:
        yield f"name in [{','.join(portion)}]"
