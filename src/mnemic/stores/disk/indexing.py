"""Making an index over the rows of a version: when, from which rows, and how well it finds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
import xxhash
from numpy.typing import NDArray

from mnemic.files import clear_os_errors
from mnemic.stores.base import Floats, Ids, Where
from mnemic.stores.config import StoreConfig
from mnemic.stores.disk.columns import in_type
from mnemic.stores.disk.index import (
    DEPTH,
    EXACT_BYTES,
    REFINEMENTS,
    SAMPLE,
    Index,
    choose,
    compressed,
    make,
    measure,
    nth_best,
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
        index, factory, first, trained = snapshot.take_index(), old.factory, old.end, old.trained
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
    index = snapshot.take_index()
    index.remove_ids(faiss.IDSelectorNot(faiss.IDSelectorBitmap(np.packbits(selection, bitorder="little"))))
    _wipe_unused(index)
    _wipe_centres(index)
    _wipe_codebook(index)
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


def _wipe_centres(index: Any) -> None:
    """Puts another list's centre in place of those whose rows are all gone: it could be a copy of the only row."""
    inverted = faiss.extract_index_ivf(index)
    quantizer = faiss.downcast_index(inverted.quantizer)
    sizes = np.array([inverted.invlists.list_size(number) for number in range(inverted.nlist)])
    if not isinstance(quantizer, faiss.IndexFlat) or sizes.all():
        return
    centres = faiss.rev_swig_ptr(quantizer.get_xb(), inverted.nlist * quantizer.d).reshape(inverted.nlist, -1)
    centres[sizes == 0] = centres[int(sizes.argmax())] if sizes.any() else 0


def _wipe_codebook(index: Any) -> None:
    """The same for entries of a product quantiser's codebook that no row needs any more."""
    inverted = faiss.downcast_index(faiss.extract_index_ivf(index))
    if not hasattr(inverted, "pq"):
        return
    lists, pq = faiss.downcast_InvertedLists(inverted.invlists), inverted.pq
    used = np.zeros((pq.M, pq.ksub), np.bool_)
    for number in range(lists.nlist):
        for codes in _codes_of(lists, number):
            bits = np.unpackbits(codes, axis=1, bitorder="little")[:, : pq.M * pq.nbits].reshape(len(codes), pq.M, -1)
            entries = bits @ (1 << np.arange(pq.nbits))
            used[np.arange(pq.M), entries] = True
            if used.all():
                return
    table = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)
    for part in range(pq.M):
        table[part, ~used[part]] = table[part, int(used[part].argmax())] if used[part].any() else 0
    faiss.copy_array_to_vector(table.reshape(-1), pq.centroids)


def _codes_of(lists: Any, number: int) -> Iterator[NDArray[np.uint8]]:
    """The codes of a list's rows (n, bytes), piece by piece."""
    size = lists.list_size(number)
    if not isinstance(lists, faiss.BlockInvertedLists):
        if size:
            yield faiss.rev_swig_ptr(lists.get_codes(number), size * lists.code_size).reshape(size, -1)
        return
    for start in range(0, size, lists.n_per_block):
        piece = np.empty((lists.n_per_block, lists.packer.code_size), np.uint8)
        block = faiss.rev_swig_ptr(lists.get_codes(number), (start // lists.n_per_block + 1) * lists.block_size)
        lists.packer.unpack_all(faiss.swig_ptr(block[-lists.block_size :]), faiss.swig_ptr(piece))
        yield piece[: size - start]


def sample(snapshot: Snapshot, count: int) -> tuple[Ids, Floats]:
    """Ids and keys of about so many rows, drawn from all over the store, the same ones every time."""
    rng = np.random.default_rng(0)
    selection, total = snapshot.selection(Where())
    ids, keys = [], []
    for segment in snapshot.segments:
        if segment.keys is None:
            continue
        there: Any = segment.rows  # or those of them that are not deleted
        if selection is not None:
            there = np.flatnonzero(selection[segment.ids_of(np.arange(segment.rows))])
        number = segment.rows if selection is None else len(there)
        rows = np.sort(rng.choice(there, min(number, -(-count * number // total)), replace=False))
        ids.append(segment.ids_of(rows))
        keys.append(in_type(segment.keys.take(rows).reshape(-1, snapshot.config.dim), np.float32))
    return np.concatenate(ids), np.concatenate(keys)


def recall_of(snapshot: Snapshot, index: Any, factory: str) -> list[list[float]]:
    """The curve of settings and recall, against a look at every row; the sample's own rows do not count."""
    ids, keys = sample(snapshot, SAMPLE)
    depth = min(DEPTH, len(snapshot) - 1)
    if depth < 1:
        return [[1, 1, 1.0]]
    truth = nth_best(snapshot.config, snapshot.key_pieces(), ids, keys, depth)
    kept = snapshot.config.keys != "codes" and compressed(factory)
    searched = Index(index, snapshot.config, [])
    return measure(searched, (ids, keys), truth, snapshot.rescored, REFINEMENTS if kept else (1,), depth)


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
