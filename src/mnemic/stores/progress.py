"""How far a build has come: a small file in the store's folder, written before and after each commit of the build.

Before a commit it says what the commit is going to have done, afterwards that it is done. Who is killed in between
leaves a plan that was carried out or not. A store never gives a number of a row twice, so it was not while the store
has given fewer numbers than planned; and whoever else adds rows settles that first.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from mnemic.config import checked
from mnemic.errors import DamagedError, UsageError
from mnemic.files import write_bytes

if TYPE_CHECKING:
    from mnemic.stores.base import Store

FILE = "build.json"
LARGEST = 4096  # bytes; a larger file is none of ours


@dataclass(frozen=True)
class Mark:
    """A point that a build has come to, or plans to."""

    batches: int = 0  # encoded and committed
    rows: int = 0  # that they became
    next_id: int = 0  # of the store, right after that commit
    tidy: bool = False  # whether the store was put in order after the last batch


class Progress:
    """The record of the build of a store; stores without a folder keep none."""

    def __init__(self, store: Store) -> None:
        folder: Path | None = getattr(store, "folder", None)
        self.path = None if folder is None else folder / FILE

    def read(self) -> tuple[Mark, Mark] | None:
        """What is done, and what was planned last (the same if that is done); None if there is no record."""
        from mnemic.stores.disk.columns import open_inside

        if self.path is None:
            return None
        try:
            with open(open_inside(self.path), "rb") as file:
                data = file.read(LARGEST + 1)
        except FileNotFoundError:
            return None
        checksum, _, text = data.partition(b"\n")
        try:
            if len(data) > LARGEST or xxhash.xxh3_128_hexdigest(text).encode() != checksum:
                raise ValueError
            body = json.loads(text)
            return _mark(body["done"]), _mark(body["planned"])
        except (ValueError, TypeError, KeyError, RecursionError, UsageError):
            raise DamagedError(
                f"{self.path}, which says how far the build has come, is damaged: copy it back from a backup, or remove"
                " it if no other text was added and nothing forgotten; then the rows will say it"
            ) from None

    def write(self, done: Mark, planned: Mark) -> None:
        """Replaces the record."""
        if self.path is not None:
            body = {"done": dataclasses.asdict(done), "planned": dataclasses.asdict(planned)}
            text = json.dumps(body).encode() + b"\n"
            write_bytes(self.path, xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)

    def settle(self, store: Store) -> None:
        """Finds out whether a build that was killed has carried out its plan: later, with others' rows, it is hard."""
        record = self.read()
        if record is not None or store.next_id == 0:
            done, planned = record or (Mark(), Mark())
            mark = planned if store.next_id >= planned.next_id else done
            if record != (mark, mark):
                self.write(mark, mark)


def _mark(entry: object) -> Mark:
    names = {"batches": int, "rows": int, "next_id": int, "tidy": bool}
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise ValueError
    return Mark(**{name: checked("build", name, entry[name], kind) for name, kind in names.items()})
