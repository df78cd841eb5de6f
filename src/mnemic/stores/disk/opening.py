"""Opening a version of a store, while others may be writing, and what to say if a file of it is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.stores.disk import manifest as manifests
from mnemic.stores.disk.manifest import Manifest
from mnemic.stores.disk.segments import COLUMNS, file_of
from mnemic.stores.disk.snapshot import Snapshot, index_path


def files_of(folder: Path, manifest: Manifest) -> list[Path]:
    """The files that a version needs."""
    files = [manifests.path_of(folder, manifest.version)]
    for record in manifest.segments:
        names = [*(name for name in COLUMNS if name != "keys" or record.keys), "sums"]
        files += [file_of(folder, record.file, name) for name in names]
    if manifest.index is not None:
        files.append(index_path(folder, manifest.index.file))
    return files


def open_version(folder: Path, version: int | None = None, known: Snapshot | None = None) -> Snapshot:
    """The newest version, or that one. Files may go while we look, if someone compacts the store: look again."""
    for _ in range(100):
        there = manifests.versions(folder)
        if version is not None and version not in there:
            raise UsageError(f"{folder} has no version {version!r}: it has {', '.join(map(str, there))}")
        newest = there[-1] if version is None else version
        try:
            manifest = manifests.read(folder, newest)
            try:
                return _measured(Snapshot(folder, manifest, known))
            except DamagedError as error:
                return _measured(_rows_alone(folder, manifest, known, error))
        except FileNotFoundError as error:
            if manifests.versions(folder) == there:
                return _measured(_rows_alone(folder, manifest, known, _missing(folder, error.filename, newest)))
    raise MnemicError(f"{folder} changes faster than it can be opened: try again")


def _measured(snapshot: Snapshot) -> Snapshot:
    index = snapshot.manifest.index
    rows = dataclasses.replace(snapshot.manifest, index=None)
    snapshot.bytes = sum(path.stat().st_size for path in files_of(snapshot.folder, rows))
    snapshot.bytes += index.bytes if index is not None else 0
    return snapshot


def _rows_alone(folder: Path, manifest: Manifest, known: Snapshot | None, damage: DamagedError) -> Snapshot:
    """A version whose index is missing or of the wrong size, if its keys are kept; else the damage is reported."""
    index = manifest.index
    if manifest.config.keys == "codes" or index is None or index_path(folder, index.file).name not in str(damage):
        raise damage from None
    return Snapshot(folder, manifest, known, without_index=str(damage))


def _missing(folder: Path, path: str, version: int) -> DamagedError:
    hints = ["copy it back from a backup"]
    if older := [str(one) for one in manifests.versions(folder) if one < version]:
        hints.append(f"open an older version (there are {', '.join(older)})")
    if Path(path).name.startswith("index-"):
        hints.append("make it anew with `mnemic store compact --rebuild`, if the store keeps its keys")
    return DamagedError(f"{path} is missing: {', or '.join(hints)}")
