"""How the disk store searches: every kind of index, true scores, the dial between speed and recall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.stores import StoreConfig, Where, open_store
from mnemic.stores.disk.index import Index, nth_best

from .test_disk import clustered, pair, recall, references

INDEXES = [
    "IVF16,Flat",
    "IVF16,SQfp16",
    "IVF16,PQ8x4fs",
    "OPQ8,IVF16,PQ8x4fs",
    "PCA8,IVF16,PQ4x4fs",
]


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("factory", INDEXES)
def test_every_index_finds_what_there_is(tmp_path: Path, factory: str, metric: str) -> None:
    store, exact = pair(tmp_path / "s", index=factory, metric=metric)
    summary = store.summary()
    assert (summary.index["kind"], summary.index["rows"]) == (factory, 2000)
    queries = clustered(40, seed=1)
    assert recall(store, exact, queries) >= 0.9
    assert recall(store, exact, queries, where="red") >= 0.9
    assert recall(store, exact, queries, k=30, where=Where.document("d7", "blue")) == 1.0
    for one in (store, exact):
        one.delete("red")
        one.commit()
    assert recall(store, exact, queries) >= 0.9
    assert recall(store, exact, queries, k=1500) > 0.9, "more than there are"
    store.compact()
    store.close()
    again = open_store(tmp_path / "s")
    assert recall(again, exact, queries) >= 0.9
    assert not again.verify()
    again.close()


def test_scores_are_true_where_keys_are_kept(tmp_path: Path) -> None:
    store, exact = pair(tmp_path / "s", index="IVF16,PQ8x4fs")
    queries = clustered(5, seed=2)
    found = store.search(queries, 10)
    keys = store.get(found.ids.reshape(-1)).keys
    assert keys is not None
    true = -((keys.reshape(5, 10, 16).astype(np.float64) - queries[:, None]) ** 2).sum(-1)
    np.testing.assert_allclose(found.scores, true, rtol=1e-5)
    np.testing.assert_array_equal(found.values, exact.get(found.ids.reshape(-1)).values.reshape(5, 10))
    store.close()


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("factory", INDEXES)
def test_the_same_search_again_finds_the_same(
    tmp_path: Path, factory: str, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mnemic.stores.disk.snapshot.CANDIDATES", 640)
    store, _ = pair(tmp_path / "s", index=factory, metric=metric)
    queries = clustered(20, seed=1)
    for k, dial in ((1, 0.5), (10, 0.5), (10, 1.0), (1900, 0.5)):
        first = store.search(queries, k, recall=dial)
        for some in (queries, queries[:1], queries[7:8]):  # all at once or one by one, as prepared by the first
            start = np.flatnonzero((queries == some[0]).all(1))[0]
            for column, wanted in zip(store.search(some, k, recall=dial), first, strict=True):
                assert column.dtype == wanted.dtype
                np.testing.assert_array_equal(column, wanted[start : start + len(some)])
    nearest = store.search(queries[:1], 1, recall=1.0)
    store.add(queries[:1], [5], references(1))
    assert store.search(queries[:1], 1, recall=1.0).ids == nearest.ids, "not committed yet"
    store.commit()
    if metric != "ip":
        assert store.search(queries[:1], 1, recall=1.0).ids == [[2000]]
    store.delete(Where())
    store.commit()
    assert not store.search(queries[:1], 1, recall=1.0).mask.any()
    store.close()


def test_queries_that_found_less_than_there_is_are_asked_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig(dim=16, keys="float32", index="IVF16,Flat")
    store, keys = open_store(tmp_path / "a", config), clustered(2000)
    keys[:2] += 1000  # a list of two rows
    store.add(keys, np.arange(2000), references(2000))
    store.commit()
    queries, asked = keys[[0, *range(100, 140)]], []
    searcher = Index.searcher

    def counting(*settings: Any) -> Any:
        search = searcher(*settings)
        return lambda queries: asked.append(len(queries)) or search(queries)

    monkeypatch.setattr(Index, "searcher", counting)
    for _ in range(3):
        asked.clear()
        assert store.search(queries, 50, recall=0.5).mask.all()
        assert asked[0] == len(queries)
        assert 1 <= sum(asked[1:]) < len(queries)


def test_the_dial(tmp_path: Path) -> None:
    store, exact = pair(tmp_path / "s", 6000, index="IVF64,Flat")
    curve = store.summary().index["curve"]
    assert curve == sorted(curve)
    assert curve[-1][2] > 0.99
    assert curve[0][2] < curve[-1][2]
    queries = clustered(60, seed=3)
    low, high = (recall(store, exact, queries, 32, recall=dial) for dial in (curve[0][2], 0.99))
    assert low < high
    assert high > 0.97
    assert recall(store, exact, queries, 32, recall=1.0) == 1.0
    store.close()


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_the_nth_best_is_that_of_all_rows_but_oneself(metric: str) -> None:
    config, keys, ids = StoreConfig(dim=16, metric=metric), clustered(1000), np.arange(1000) * 3
    parts = [(ids[start : start + 300], keys[start : start + 300]) for start in range(0, 1000, 300)]
    some, exact = np.array([0, 299, 300, 999]), keys.astype(np.float64)
    found = nth_best(config, parts, ids[some], keys[some], 32)
    for row, score in zip(some, found, strict=True):
        scores = exact @ exact[row] if metric == "ip" else -((exact - exact[row]) ** 2).sum(1)
        assert score == pytest.approx(np.sort(np.delete(scores, row))[-32], abs=1e-4)


def test_a_sample_of_recall_is_honest(tmp_path: Path) -> None:
    """The recall in the manifest is that of queries the index has not seen, give or take."""
    store, exact = pair(tmp_path / "s", 6000, index="IVF64,Flat")
    queries = clustered(400, seed=4)
    for lists, _, said in store.summary().index["curve"]:
        index = store._snapshot.index  # type: ignore[attr-defined]
        ids, _ = index.search(queries, 32, int(lists))
        wanted = exact.search(queries, 32).ids
        seen = np.mean([len(set(a) & set(b)) / 32 for a, b in zip(ids, wanted, strict=True)])
        assert abs(seen - said) < 0.08
    store.close()
