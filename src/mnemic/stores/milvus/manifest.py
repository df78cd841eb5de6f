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
        numbers = [value for value in entries.values() if isinstance(value, int)]
        pairs = [pair for pair in entries["curve"] if len(pair) != 2]
        if pairs or any(number < 0 for number in numbers + entries["dead_spaces"] + entries["dead_sources"]):
            raise DamagedError("it holds numbers that cannot be")
        return cls(**entries)
