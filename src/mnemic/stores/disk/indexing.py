"""Making an index over the rows of a version: when, from which rows, and how well it finds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
import xxhash

from mnemic.files import clear_os_errors
from mnemic.stores.base import Floats, Ids, Where
from mnemic.stores.config import StoreConfig
from mnemic.stores.disk.index import (
    DEPTH,
    EXACT_BYTES,
    REFINEMENTS,
    SAMPLE,
    Index,
    choose,
    compressed,
    look_at_all,
    make,
    measure,
    train,
    training_rows,
)
from mnemic.stores.disk.manifest import IndexRecord
from mnemic.stores.disk.snapshot import Snapshot, index_path

Progress = Callable[[int, int], None]
RETRAIN = 4  # an index is trained anew when there are so many times the rows it was trained for
UNCOVERED_BYTES = EXACT_BYTES // 4  # of float32 keys that may wait outside of the index


def check(config: StoreConfig) -> None:
    """Refuses an index that FAISS cannot make, before there are rows."""
    if config.index not in ("auto", "exact"):
        make(config, config.index)


def due(snapshot: Snapshot) -> Literal["train", "extend"] | None:
    """Whether it is time for a new index, or to put new rows into the old one."""
    config, old, rows = snapshot.config, snapshot.manifest.index, len(snapshot)
    factory = choose(config, rows)
    if old is None:
        return "train" if factory else None
    if factory and config.keys != "codes":
        other_kind = old.factory.rpartition(",")[2] != factory.rpartition(",")[2]
        if other_kind or rows > RETRAIN * old.trained:
            return "train"
    uncovered = (snapshot.manifest.next_id - old.end) * config.dim * 4
    return "extend" if uncovered > UNCOVERED_BYTES else None


def updated(
    snapshot: Snapshot, number: int, progress: Progress | None = None, anew: bool = False
) -> IndexRecord | None:
    """A new index in file `number` if it is time for one, or if it shall be made anew."""
    config, old = snapshot.config, snapshot.manifest.index
    todo = "train" if anew and config.keys != "codes" and choose(config, len(snapshot)) else due(snapshot)
    if todo is None:
        return None
    if todo == "extend" and old is not None and snapshot.index is not None:
        index, factory, first, trained = snapshot.index.faiss, old.factory, old.end, old.trained
        curve, measured = old.curve, old.measured
    else:
        factory, first, trained, measured = choose(config, len(snapshot)), 0, len(snapshot), 0
        index = make(config, factory)
        train(index, sample(snapshot, training_rows(index))[1])
    for ids, keys in snapshot.key_pieces(first_id=first):
        index.add_with_ids(np.ascontiguousarray(keys), ids)
        if progress is not None:
            progress(index.ntotal, len(snapshot))
    if not measured or (config.keys != "codes" and index.ntotal > 2 * measured):
        curve, measured = recall_of(snapshot, index, factory), index.ntotal
    size, checksum = write(index, index_path(snapshot.folder, number))
    end = snapshot.manifest.next_id
    return IndexRecord(number, size, checksum, factory, index.ntotal, end, trained, measured, curve)


def without_deleted(snapshot: Snapshot, number: int) -> IndexRecord | None:
    """The index without deleted rows, in file `number`, for a store whose keys are nowhere else."""
    old, selection = snapshot.manifest.index, snapshot.selection(Where())[0]
    if old is None or snapshot.index is None or selection is None:
        return old
    index = snapshot.index.faiss
    index.remove_ids(faiss.IDSelectorNot(faiss.IDSelectorBitmap(np.packbits(selection, bitorder="little"))))
    _wipe_unused(index)
    size, checksum = write(index, index_path(snapshot.folder, number))
    changes = {"file": number, "bytes": size, "checksum": checksum, "rows": index.ntotal}
    return dataclasses.replace(old, **changes)


def _wipe_unused(index: Any) -> None:
    """Overwrites codes that removed rows left in blocks that are not full."""
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    if not isinstance(lists, faiss.BlockInvertedLists):
        return
    empty = np.zeros(lists.packer.code_size, np.uint8)
    for number in range(lists.nlist):
        used = lists.list_size(number)
        for place in range(used, -(-used // lists.n_per_block) * lists.n_per_block):
            lists.packer.pack_1_c(faiss.swig_ptr(empty), place, lists.get_codes(number))


def sample(snapshot: Snapshot, count: int) -> tuple[Ids, Floats]:
    """Ids and keys of about so many rows, drawn from all over the store, the same ones every time."""
    rng = np.random.default_rng(0)
    selection, _ = snapshot.selection(Where())
    total = sum(segment.rows for segment in snapshot.segments if segment.keys is not None)
    ids, keys = [], []
    for segment in snapshot.segments:
        if segment.keys is None:
            continue
        share = min(segment.rows, -(-count * segment.rows // total))
        rows = np.sort(rng.choice(segment.rows, share, replace=False))
        found = segment.ids_of(rows)
        if selection is not None:
            rows, found = rows[selection[found]], found[selection[found]]
        ids.append(found)
        keys.append(np.asarray(segment.keys.take(rows), np.float32).reshape(-1, snapshot.config.dim))
    return np.concatenate(ids), np.concatenate(keys)


def recall_of(snapshot: Snapshot, index: Any, factory: str) -> list[list[float]]:
    """The curve of settings and recall, against a look at every row; the sample's own rows do not count."""
    ids, keys = sample(snapshot, SAMPLE)
    found, scores = look_at_all(snapshot.config, snapshot.key_pieces(), keys, DEPTH + 1)
    scores[found == ids[:, None]] = -np.inf
    depth = min(DEPTH, found.shape[1] - 1)
    if depth < 1:
        return [[1, 1, 1.0]]
    truth = -np.sort(-scores, 1)[:, depth - 1]
    kept = snapshot.config.keys != "codes" and compressed(factory)
    searched = Index(index, snapshot.config, [])
    return measure(searched, (ids, keys), truth, snapshot.rescored, REFINEMENTS if kept else (1,))


def write(index: Any, path: Path) -> tuple[int, str]:
    """Writes an index durably, piece by piece; its size and checksum."""
    digest, failure = xxhash.xxh3_128(), []
    size = 0
    with clear_os_errors(path), open(path, "wb", buffering=1 << 20) as file:

        def piece(data: bytes) -> int:
            nonlocal size
            try:
                file.write(data)
            except OSError as error:
                failure.append(error)
                raise
            digest.update(data)
            size += len(data)
            return len(data)

        try:
            faiss.write_index(index, faiss.PyCallbackIOWriter(piece, 1 << 20))
        except RuntimeError:
            if failure:
                raise failure[0] from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()
