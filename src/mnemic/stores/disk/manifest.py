"""The manifest of a version: one small JSON file, written last, that vouches for all others.

It names files by number only, so that no manifest can lead out of the store's folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from mnemic import __version__
from mnemic.config import checked
from mnemic.errors import DamagedError, UsageError
from mnemic.files import write_bytes
from mnemic.stores.config import StoreConfig
from mnemic.stores.disk.columns import open_inside

FORMAT = "mnemic store"
SCHEMA = 1
LARGEST = 1 << 28  # bytes of a manifest; a larger one is refused before it is read
HIGHEST = 1 << 48  # of any number in a manifest

_NAME = re.compile(r"manifest-(\d{8})\.json")
_CHECKSUM = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class SegmentRecord:
    """Rows that were written together: their number of files, rows and entries, and the checksum of all checksums."""

    file: int
    rows: int
    spans: int
    runs: int
    sources: int
    keys: bool
    checksum: str


@dataclass(frozen=True)
class IndexRecord:
    """A FAISS index over all rows with a number below `end`, and what was measured of it."""

    file: int
    bytes: int
    checksum: str
    factory: str
    rows: int
    end: int
    trained: int
    measured: int
    curve: list[list[float]]  # [lists looked into, candidates per result, recall at 32], the cheapest first


Record = TypeVar("Record", SegmentRecord, IndexRecord)


@dataclass(frozen=True)
class Manifest:
    """Everything about one version of a store."""

    version: int
    config: StoreConfig
    next_id: int = 0
    next_file: int = 1
    segments: list[SegmentRecord] = field(default_factory=list)
    deleted: list[list[int]] = field(default_factory=list)  # [first number, count]
    index: IndexRecord | None = None

    def replaced(self, **changes: Any) -> Manifest:
        """The next version, with these changes."""
        return dataclasses.replace(self, version=self.version + 1, **changes)


def path_of(folder: Path, version: int) -> Path:
    """Where the manifest of a version is."""
    return folder / f"manifest-{version:08d}.json"


def versions(folder: Path) -> list[int]:
    """The versions that a store's folder has, oldest first."""
    return sorted(int(found[1]) for name in os.listdir(folder) if (found := _NAME.fullmatch(name)))


def write(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest; when this returns, its version is the newest one, for good."""
    body = {"format": FORMAT, "schema": SCHEMA, "library": __version__, **dataclasses.asdict(manifest)}
    body["config"] = manifest.config.to_dict()
    write_bytes(path_of(folder, manifest.version), sealed(body))


def sealed(body: dict[str, Any]) -> bytes:
    """A manifest's text: its checksum in the first line, its JSON below."""
    text = json.dumps(body, indent=1, ensure_ascii=False).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text + b"\n"


def read(folder: Path, version: int) -> Manifest:
    """Reads and checks the manifest of a version."""
    path = path_of(folder, version)
    descriptor = open_inside(path)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > LARGEST:
            raise DamagedError(f"{path} is no manifest of a store: it has more than {LARGEST} bytes")
        try:
            data = file.read()
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
    try:
        manifest = parse(data)
    except (UsageError, DamagedError) as error:
        older = [other for other in versions(folder) if other < version]
        hint = f"; the version before is {older[-1]}: open_store(..., version={older[-1]})" if older else ""
        raise DamagedError(f"{path} cannot be used: {str(error)[:300]}{hint}") from None
    if manifest.version != version:
        raise DamagedError(f"{path} holds the manifest of version {manifest.version}: files were exchanged")
    return manifest


def parse(data: bytes) -> Manifest:
    """The manifest in these bytes; whatever is not exactly as it must be is refused with a reason."""
    checksum, _, text = data.partition(b"\n")
    if xxhash.xxh3_128_hexdigest(text.removesuffix(b"\n")).encode() != checksum or not text.endswith(b"\n"):
        raise DamagedError("its checksum is wrong, so it is incomplete or was altered")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"it is not JSON ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedError("it is not the manifest of a store")
    if body.get("schema") != SCHEMA:
        raise DamagedError(
            f"it has schema {body.get('schema')!r}, and this version of mnemic reads schema {SCHEMA}: install mnemic "
            f"{body.get('library')!r} or newer"
        )
    known = {"format", "schema", "library", *(one.name for one in dataclasses.fields(Manifest))}
    if set(body) != known:
        raise DamagedError(f"it has the entries {sorted(map(str, set(body) ^ known))} too many or too few")
    if not isinstance(body["config"], dict):
        raise DamagedError("its config is no table of options")
    return _consistent(
        Manifest(
            version=_number(body["version"], "version"),
            config=StoreConfig.from_dict(body["config"]),
            next_id=_number(body["next_id"], "next_id"),
            next_file=_number(body["next_file"], "next_file"),
            segments=[_record(SegmentRecord, entry) for entry in _list(body["segments"], "segments")],
            deleted=[_pair(pair) for pair in _list(body["deleted"], "deleted")],
            index=None if body["index"] is None else _record(IndexRecord, body["index"]),
        )
    )


def _number(value: Any, what: str, highest: int = HIGHEST) -> int:
    number: int = checked("manifest", what, value, int)
    if not 0 <= number <= highest:
        raise DamagedError(f"its {what} is {number}, expected 0 to {highest}")
    return number


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise DamagedError(f"its {what} is no list")
    return value


def _pair(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) != 2:
        raise DamagedError("a range of deleted rows is no pair")
    return [_number(value[0], "deleted"), _number(value[1], "deleted")]


def _record(kind: type[Record], entry: Any) -> Record:
    names = {one.name: one.type for one in dataclasses.fields(kind)}
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise DamagedError(f"a {kind.__name__} has entries too many or too few")
    for name, value in entry.items():
        if names[name] == "int":
            _number(value, name)
        elif names[name] == "bool":
            checked("manifest", name, value, bool)
        elif names[name] == "str":
            checked("manifest", name, value, str)
            if name == "checksum" and not _CHECKSUM.fullmatch(value):
                raise DamagedError(f"{value[:80]!r} is no checksum")
        else:
            checked("manifest", name, value, list[list[float]])
    return kind(**entry)


def _consistent(manifest: Manifest) -> Manifest:
    """Refuses numbers that cannot belong together."""
    index, files = manifest.index, [segment.file for segment in manifest.segments]
    if index is not None:
        files.append(index.file)
        if index.end > manifest.next_id or index.rows > index.end or not index.curve:
            raise DamagedError("its index covers rows that are not there")
        for step in index.curve:
            if step[1:2] > [1] and manifest.config.keys == "codes":
                raise DamagedError("it looks again at candidates, whose keys it does not keep")
            if len(step) != 3 or not (1 <= step[0] <= 2**31 and 1 <= step[1] <= 2**16 and 0 <= step[2] <= 1):
                raise DamagedError("what it says of the index's recall makes no sense")
    if len(set(files)) != len(files) or any(file >= manifest.next_file for file in files):
        raise DamagedError("it names a file twice, or one that was never written")
    for segment in manifest.segments:
        if not 0 < segment.rows <= manifest.next_id or not segment.sources:
            raise DamagedError(f"segment {segment.file} has {segment.rows} rows")
        if not (0 < segment.spans <= segment.rows and 0 < segment.runs <= segment.rows):
            raise DamagedError(f"segment {segment.file} has more spans than rows, or none")
        if not segment.keys and (index is None or manifest.config.keys != "codes"):
            raise DamagedError(f"segment {segment.file} has no keys, and no index holds them")
    if sum(segment.rows for segment in manifest.segments) > manifest.next_id:
        raise DamagedError("it has more rows than were ever added")
    if sum(count for _, count in manifest.deleted) > sum(segment.rows for segment in manifest.segments):
        raise DamagedError("it has more deleted rows than rows")
    end = 0
    for first, count in manifest.deleted:
        if first < end or not count or first + count > manifest.next_id:
            raise DamagedError("its ranges of deleted rows overlap or lie outside")
        end = first + count
    return manifest
