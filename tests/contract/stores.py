"""Each kind of store as the contract tests use it: how to make an empty one and how to open it again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mnemic.stores import References, Source, Store, StoreConfig, open_store, registry

_names = itertools.count()


@dataclass
class Kind:
    """A kind of store, and a place for new ones."""

    name: str
    new_address: Callable[[], str]
    lasting: bool = True  # whether it can be opened again
    effort: int = 1  # how much slower it is than the others, for the number of examples

    def make(self, **options: Any) -> Store:
        """An empty store."""
        return open_store(self.new_address(), StoreConfig(**{"dim": 8, "keys": "float32", **options}))

    def again(self, store: Store) -> Store:
        """The same store opened anew, if it can be."""
        if not self.lasting:
            return store
        store.close()
        return open_store(store.address)


def kinds() -> list[str]:
    """All kinds of stores that the library has."""
    return list(registry())


def kind(name: str, folder: Path, milvus: Callable[[], str]) -> Kind:
    """The kind of that name; `milvus` gives the address of a running server."""
    if name == "ram":
        return Kind(name, lambda: "ram:", lasting=False)
    if name == "milvus":
        address = milvus()
        return Kind(name, lambda: f"{address}/mnemic_test_{os.getpid()}_{next(_names)}", effort=20)
    return Kind(name, lambda: str(folder / f"{next(_names)}.store"))


def rows(rng: np.random.Generator, count: int, dim: int = 8, sources: int = 3) -> tuple[Any, Any, References]:
    """Random rows that refer to a few documents in two namespaces."""
    names = [Source(f"document {number}", ("red", "blue")[number % 2]) for number in range(sources)]
    references = References(names, np.sort(rng.integers(0, sources, count)), rng.integers(0, 1000, count))
    return rng.standard_normal((count, dim)).astype(np.float32), rng.integers(0, 60_000, count), references
