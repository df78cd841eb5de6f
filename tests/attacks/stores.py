"""The stores that are attacked, and all that can be asked of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mnemic.errors import MnemicError
from mnemic.stores import References, Source, Store, StoreConfig, Where, open_store
from mnemic.stores.disk.opening import files_of

DIM = 8
CONFIGS = {
    "kept": StoreConfig(dim=DIM, index="IVF4,PQ4x4fs"),
    "codes": StoreConfig(dim=DIM, keys="codes", index="IVF4,PQ4x4fs", metric="ip"),
    "codes alone": StoreConfig(dim=DIM, keys="codes", index="IVF4,PQ4x4fs"),
}
QUERIES = np.random.default_rng(99).standard_normal((3, DIM)).astype(np.float32)


def rows(rng: np.random.Generator, count: int, documents: range) -> tuple[Any, Any, References]:
    """Rows of documents that are called by their numbers, in two namespaces."""
    sources = [Source(f"document {number}", ("red", "blue")[number % 2]) for number in documents]
    which = np.sort(rng.integers(0, len(sources), count))
    keys = rng.standard_normal((count, DIM)).astype(np.float32)
    return keys, rng.integers(0, 60_000, count), References(sources, which, rng.integers(0, 10_000, count))


def build(folder: Path, kind: str, seed: int = 0) -> None:
    """A store with all there can be: gaps in its numbers, two segments, deleted rows, an index that lacks some rows."""
    config = CONFIGS[kind]
    rng = np.random.default_rng(seed)
    with open_store(folder, config) as store:
        store.add(*rows(rng, 260, range(6)))
        store.commit()
        store.delete(Where.document("document 2", "red"))
        store.compact()
        if kind != "codes alone":
            store.add(*rows(rng, 70, range(4, 9)))
            store.commit()
        store.delete(Where.document("document 5", "blue"))
        store.commit()


def live(store: Any) -> list[int]:
    """The numbers of all rows."""
    found = store.search(QUERIES[:1], len(store), recall=1.0)
    return sorted(found.ids[found.mask].tolist())


def questions(ids: list[int]) -> dict[str, Callable[[Any], Any]]:
    """Everything that can be asked of a store with these rows; the answers are plain values."""
    asked: dict[str, Callable[[Any], Any]] = {
        "rows": lambda store: _rows(store, ids),
        "one row": lambda store: _rows(store, ids[-1:]),
        "summary": lambda store: {**asdict(store.summary()), "address": ""},
        "length": len,
    }
    wheres: tuple[Any, ...] = (None, "red", ["blue", "nobody"], Where.document("document 7", "blue"))
    for k, recall in ((1, 0.5), (7, None), (1000, 1.0)):
        for where in wheres:
            asked[f"{k} nearest of {where} at {recall}"] = lambda store, k=k, where=where, recall=recall: _found(
                store, k, where, recall
            )
    return asked


def _rows(store: Store, ids: list[int]) -> Any:
    got = store.get(ids)
    keys = None if got.keys is None else got.keys.tolist()
    return keys, got.values.tolist(), [got.references[row] for row in range(len(ids))]


def _found(store: Store, k: int, where: Any, recall: float | None) -> Any:
    found = store.search(QUERIES, k, where, recall)
    return found.ids.tolist(), found.scores.tolist(), found.values.tolist(), found.mask.tolist()


def answers(folder: Path, ids: list[int]) -> dict[str, Any]:
    """The answer to each question, or the error that was raised in its place; anything else is not caught."""
    try:
        store: Any = open_store(folder)
    except MnemicError as error:
        return {"opening": error}
    with store:
        given: dict[str, Any] = {"opening": None}
        for question, ask in questions(ids).items():
            try:
                given[question] = ask(store)
            except MnemicError as error:
                given[question] = error
        given["verify"] = store.verify()
    return given


class Victim:
    """A store, all the answers that it gives, and a way to put it back to what it was."""

    def __init__(self, folder: Path, kind: str, seed: int = 0) -> None:
        self.folder, self.kind = folder, kind
        build(folder, kind, seed)
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        with open_store(folder) as store:
            self.ids, self.version = live(store), store.version  # type: ignore[attr-defined]
            self.needed = {path.name for path in files_of(store.folder, store._snapshot.manifest)}  # type: ignore[attr-defined]
        self.answers = answers(folder, self.ids)

    def ask(self) -> dict[str, Any]:
        """The answers that the store gives now."""
        return answers(self.folder, self.ids)

    def restore(self, names: Iterator[str] | list[str]) -> None:
        """Puts these files back."""
        for name in names:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif os.path.lexists(path):
                path.unlink()
            path.write_bytes(self.files[name])
