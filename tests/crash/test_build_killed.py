"""A build killed with SIGKILL and started again, again and again: the same rows as never stopped, bit for bit."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.stores import open_store

from .killing import Forks

KINDS = ("plain", "exact", "dropping")

Rows = tuple[bytes, bytes, list[Any]]


Builds = Forks[Rows]


def rows(path: Path) -> Rows:
    """All rows of a store: keys, values, references; in the order of their numbers."""
    with open_store(path) as store:
        assert store.verify() == []
        found = store.get(np.sort(store.search(np.ones((1, 16)), len(store), recall=1.0).ids[0]))
        assert found.keys is not None
        places = [found.references[row] for row in range(len(store))]
        return found.keys.tobytes(), found.values.tobytes(), places


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    made = Builds("building_process", tmp_path_factory.mktemp("killed"), rows)
    with made.process:  # closes its stdin at the end, on which it ends too
        yield made
    assert made.process.returncode == 0


def check(builds: Builds, kind: str, out: Path) -> None:
    assert rows(out) == builds.never_stopped(kind)
    with open_store(out) as store, open_store(builds.folder / f"never-stopped-{kind}") as whole:
        queries = np.random.default_rng(0).standard_normal((20, 16)).astype(np.float32)
        found, expected = store.search(queries, 5, recall=1.0), whole.search(queries, 5, recall=1.0)
        np.testing.assert_array_equal(found.ids, expected.ids)


def test_the_builds_that_are_compared_are_worth_comparing(builds: Builds) -> None:
    counts = {kind: len(builds.never_stopped(kind)[2]) for kind in KINDS}
    assert counts["plain"] == counts["exact"] > 500
    assert counts["plain"] // 4 < counts["dropping"] < counts["plain"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_file_operations(builds: Builds, tmp_path: Path, kind: str, seed: int) -> None:
    draw, killed = random.Random(f"{kind}{seed}"), 0
    builds.never_stopped(kind)
    while (status := builds.work(kind, tmp_path / "s", die_at=draw.randrange(40, 150))) != 0:
        assert status == -signal.SIGKILL
        killed += 1
        assert killed < 60
    assert killed >= 2
    check(builds, kind, tmp_path / "s")


@pytest.mark.parametrize("kind", KINDS)
def test_others_add_and_forget_whenever_it_is_killed(builds: Builds, tmp_path: Path, kind: str) -> None:
    draw, killed = random.Random(kind), 0
    never_stopped = builds.never_stopped(kind)
    while builds.work(kind, tmp_path / "s", die_at=draw.randrange(40, 150)) != 0:
        killed += 1
        assert killed < 60
        if any((tmp_path / "s").glob("manifest-*")):
            assert builds.work("visit", tmp_path / "s") == 0
    assert killed >= 2
    assert rows(tmp_path / "s") == never_stopped


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_from_outside_at_random_moments(builds: Builds, tmp_path: Path, seed: int) -> None:
    draw, kind = random.Random(seed), "plain"
    for _ in range(10):
        assert builds.work(kind, tmp_path / "s", kill_after=draw.uniform(0.02, 0.5)) in (0, -signal.SIGKILL)
    assert builds.work(kind, tmp_path / "s") == 0
    check(builds, kind, tmp_path / "s")
