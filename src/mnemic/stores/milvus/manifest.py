"""The manifest of a store on Milvus: one text among the properties of its collection, replaced whole."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from typing import Any

from mnemic import __version__
from mnemic.config import checked
from mnemic.errors import DamagedError, UsageError
from mnemic.stores.config import StoreConfig
from mnemic.stores.milvus.index import known
from mnemic.stores.milvus.server import EVERY_LIST

FORMAT = "mnemic store"
SCHEMA = 1


@dataclass(frozen=True)
class Manifest:
    """What is committed, and what is under way."""

    config: StoreConfig
    version: int = 0
    next_id: int = 0  # rows from this number on are not committed
    next_name: int = 0  # names from this number on are not committed
    rows: int = 0
    time: int = 0  # of the server, when it was written to last: whoever reads waits until it shows that; 0: unknown
    deleted: int = 0  # rows since `compact`
    index: str = "exact"
    settled: int = 0  # rows below this number are in the index
    measured: int = 0  # rows there were when the curve was measured
    curve: list[list[float]] = field(default_factory=list)  # [lists looked into, recall at 32], the fewest first
    writer: str = ""  # who is writing, or was when it ended
    dead_spaces: list[int] = field(default_factory=list)  # deleted, and perhaps not removed yet
    dead_sources: list[int] = field(default_factory=list)

    def text(self) -> str:
        """The manifest as JSON."""
        body = dataclasses.asdict(self) | {"config": self.config.to_dict()}
        return json.dumps({"format": FORMAT, "schema": SCHEMA, "library": __version__, **body})

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """The manifest in a text; what is not exactly as it must be is refused with a reason."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"it is not JSON ({error})") from None
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise DamagedError("it is not the manifest of a store")
        schema, library = body.pop("schema", None), body.pop("library", None)
        if schema != SCHEMA:
            raise DamagedError(
                f"it has schema {schema!r}, and this version of mnemic reads schema {SCHEMA}: install mnemic "
                f"{library!r} or newer"
            )
        kinds = typing.get_type_hints(cls) | {"config": dict[str, Any]}
        if set(body) != set(kinds):
            raise DamagedError(f"it has the entries {sorted(map(str, set(body) ^ set(kinds)))} too many or too few")
        try:
            entries = {name: checked("manifest", name, value, kinds[name]) for name, value in body.items()}
            entries["config"] = StoreConfig.from_dict(entries["config"])
        except UsageError as error:
            raise DamagedError(str(error)) from None
        manifest = cls(**entries)
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Refuses what no store can have written."""
        numbers = [value for value in dataclasses.astuple(self) if isinstance(value, int)]
        numbers += self.dead_spaces + self.dead_sources
        measured = all(len(pair) == 2 and 1 <= pair[0] <= EVERY_LIST and 0 <= pair[1] <= 1 for pair in self.curve)
        counted = max(self.rows, self.settled) <= self.next_id
        if not (measured and counted and known(self.index) and all(0 <= number < 1 << 63 for number in numbers)):
            raise DamagedError("it holds numbers that cannot be")
