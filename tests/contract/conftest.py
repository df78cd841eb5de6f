"""The Milvus server that the tests of stores share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.contract.milvus_server import shared, skip_without_milvus


@pytest.fixture(scope="session")
def milvus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real Milvus server on this machine: one for all processes of a test run, which ends with it."""
    skip_without_milvus()
    folder = tmp_path_factory.getbasetemp()
    with shared(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) as address:
        yield address
