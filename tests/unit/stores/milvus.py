"""What the tests of the store on Milvus share."""

from __future__ import annotations

from typing import Any

import numpy as np

from mnemic.stores import Store
from tests.contract.stores import rows

DIM = 8


def fill(*stores: Store, seed: int = 0, count: int = 30, sources: int = 3, index: bool = True) -> None:
    for one in stores:
        one.add(*rows(np.random.default_rng(seed), count, sources=sources))
        one.commit(index=index)


def queries(count: int = 5) -> Any:
    return np.random.default_rng(99).standard_normal((count, DIM)).astype(np.float32)


def on_server(one: Any) -> int:
    """All rows and names that the server has of a store, those included that no one sees, but for the clock."""
    return one._server.count("id != -1")


def everything(one: Any) -> int:
    """All rows and names that the server should have."""
    summary = one.summary()
    return summary.rows + summary.documents + len(summary.namespaces)


def assert_whole(one: Store) -> None:
    """All rows are there, and nothing else."""
    assert one.verify() == []
    assert on_server(one) == everything(one)
