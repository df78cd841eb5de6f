"""Stores on a real Milvus server, each under an address of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mnemic.stores import Store, StoreConfig, open_store
from tests.contract.conftest import milvus_server  # noqa: F401
from tests.unit.stores.milvus import DIM

numbers = itertools.count()


@pytest.fixture
def new_address(milvus_server: str) -> Callable[[], str]:  # noqa: F811
    return lambda: f"{milvus_server}/unit_{os.getpid()}_{next(numbers)}"


@pytest.fixture
def make(new_address: Callable[[], str]) -> Iterator[Callable[..., tuple[Store, Store]]]:
    """Makes a store on Milvus and one in memory to compare with."""
    made: list[Store] = []

    def make(**options: Any) -> tuple[Store, Store]:
        config = StoreConfig(**{"dim": DIM, "keys": "float32", **options})
        made.append(open_store(new_address(), config))
        return made[-1], open_store("ram:", config)

    yield make
    for one in made:
        one.close()
