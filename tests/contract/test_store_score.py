"""The scores of given rows: every kind of store says of them what its search says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.errors import UsageError
from mnemic.stores import References, Source, Store, StoreConfig, Where, base, open_store
from tests.contract.stores import Kind, kind, kinds, rows


@pytest.fixture(params=kinds())
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return kind(request.param, tmp_path, lambda: request.getfixturevalue("milvus_server"))


def filled(stores: Kind, count: int = 90, **options: Any) -> tuple[Store, Any]:
    store, some = stores.make(**options), rows(np.random.default_rng(0), count, sources=6)
    store.add(*some)
    store.commit()
    return store, some


def naive(metric: str, query: Any, key: Any) -> float:
    query, key = query.astype(np.float64), key.astype(np.float64)
    if metric == "l2":
        return -float(((query - key) ** 2).sum())
    lengths = np.linalg.norm(query) * np.linalg.norm(key) if metric == "cosine" else 1.0
    return float(query @ key / lengths)


@pytest.mark.parametrize("keys", ["float32", "float16"])
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_rows_score_as_when_they_are_found(stores: Kind, metric: str, keys: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(base, "LOOKED_UP", 7 * 8)  # seven rows at a time
    store, some = filled(stores, metric=metric, keys=keys)
    queries = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    found = store.search(queries, 40, recall=1.0)
    order = np.random.default_rng(2).permuted(np.tile(np.arange(40), (5, 1)), axis=1)
    ids, scores, values = (np.take_along_axis(part, order, 1) for part in found[:3])
    scored = store.score(queries, ids)
    assert scored.mask.all()
    assert [part.dtype for part in scored] == [part.dtype for part in found]
    np.testing.assert_array_equal(scored.ids, ids)
    np.testing.assert_array_equal(scored.values, values)
    np.testing.assert_array_equal(scored.values, some[1][ids])
    np.testing.assert_allclose(scored.scores, scores, rtol=1e-5, atol=1e-5)
    wanted = [[naive(metric, query, some[0][row]) for row in line] for query, line in zip(queries, ids, strict=True)]
    rounding = 1e-2 if keys == "float16" else 1e-5
    np.testing.assert_allclose(scored.scores, wanted, rtol=rounding, atol=rounding)
    store.close()


def assert_scored(store: Store, queries: Any, ids: Any, wanted: Any, where: Any = None) -> None:
    """Where wanted, the rows of these numbers with their values and finite scores; elsewhere nothing."""
    found = store.score(queries, ids, where)
    np.testing.assert_array_equal(found.mask, wanted)
    np.testing.assert_array_equal(found.ids, np.where(wanted, ids, 0))
    assert np.isneginf(found.scores[~found.mask]).all()
    assert np.isfinite(found.scores[found.mask]).all()
    assert not found.values[~found.mask].any()
    np.testing.assert_array_equal(found.values[found.mask], store.get(found.ids[found.mask]).values)


def test_what_is_not_there_has_no_score(stores: Kind) -> None:
    store, some = filled(stores)
    ids = np.array([[5, -1, 89], [90, 2**60, 5], [-1, -(2**60), -1]])
    assert_scored(store, some[0][:3], ids, [[True, False, True], [False, False, True], [False] * 3])
    store.add(*rows(np.random.default_rng(3), 2))
    assert_scored(store, some[0][:1], np.array([[89, 90, 91]]), [[True, False, False]])
    store.commit()
    assert_scored(store, some[0][:1], np.array([[89, 90, 92]]), [[True, True, False]])
    store.close()


def test_deleted_rows_have_no_score(stores: Kind) -> None:
    store, some = filled(stores)
    ids = np.arange(90)[None].repeat(2, 0)
    red = np.array([some[2][row][0].namespace == "red" for row in range(90)])
    assert 0 < red.sum() < 90
    store.delete("red")
    assert_scored(store, some[0][:2], ids, np.ones((2, 90), np.bool_))
    store.commit()
    for _ in range(2):
        assert_scored(store, some[0][:2], ids, np.tile(~red, (2, 1)))
        store.compact()
        store = stores.again(store)
    store.close()


def test_only_rows_that_are_meant_have_a_score(stores: Kind) -> None:
    store, some = filled(stores)
    ids = np.random.default_rng(4).integers(0, 90, (4, 30))
    for where in (
        "red",
        ["red", "blue"],
        [],
        "nobody",
        Where.document("document 2", "red"),
        Where(documents="nothing"),
    ):
        meant = np.array([some[2][row][0] in Where.of(where) for row in range(90)])
        assert_scored(store, some[0][:4], ids, meant[ids], where)
    store.close()


def test_rows_of_several_commits_and_an_empty_store(stores: Kind) -> None:
    store, rng = stores.make(), np.random.default_rng(5)
    one = np.ones((1, 8), np.float32)
    assert not store.score(one, [[0, 1, -1]]).mask.any()
    for size in (3, 40, 1):
        store.add(*rows(rng, size))
        store.commit()
    ids = rng.permutation(44)[None]
    assert_scored(store, one, ids, np.ones((1, 44), np.bool_))
    assert store.score(np.empty((0, 8)), np.empty((0, 3), np.int64)).ids.shape == (0, 3)
    assert store.score(one, np.empty((1, 0), np.int64)).mask.shape == (1, 0)
    store.close()


def test_a_row_may_be_asked_for_by_many(stores: Kind) -> None:
    store, some = filled(stores, 3)
    found = store.score(some[0], [[2, 2, 0], [2, 1, 2], [0, 0, 0]])
    apart = -((some[0][:, None] - some[0]) ** 2).sum(-1)
    wanted = [apart[0, [2, 2, 0]], apart[1, [2, 1, 2]], apart[2, [0, 0, 0]]]
    np.testing.assert_allclose(found.scores, wanted, rtol=1e-5)
    store.close()


def test_bad_questions_are_refused(stores: Kind) -> None:
    store, some = filled(stores)
    for queries, ids in (
        (some[0][:2], [1, 2]),
        (some[0][:2], [[1, 2]]),
        (some[0][:1], [[0.5]]),
        (np.ones((1, 9)), [[1]]),
        (np.full((1, 8), np.nan), [[1]]),
    ):
        with pytest.raises(UsageError):
            store.score(queries, ids)
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.score(some[0][:1], [[1]])


def test_a_store_of_codes_has_nothing_to_score_by(tmp_path: Path) -> None:
    with open_store(tmp_path / "codes", StoreConfig(dim=8, keys="codes", index="IVF1,PQ4x4fs")) as store:
        store.add(np.ones((2, 8)), [1, 2], References([Source("a")], np.zeros(2, np.int64), np.arange(2)))
        store.commit()
        with pytest.raises(UsageError, match="keeps no keys to score rows by: build it with keys = 'float16'"):
            store.score(np.ones((1, 8)), [[0]])


def test_few_keys_are_held_at_a_time(stores: Kind, monkeypatch: Any) -> None:
    store, some = filled(stores)
    sizes, look_up = list[int](), store._look_up
    monkeypatch.setattr(store, "_look_up", lambda ids, where: sizes.append(len(ids)) or look_up(ids, where))
    monkeypatch.setattr(base, "LOOKED_UP", 40 * 8)
    found = store.score(some[0], np.tile(np.arange(90), (90, 1)))
    assert sizes == [40, 40, 10], "each row once, however many ask for it"
    np.testing.assert_allclose(found.scores.diagonal(), 0, atol=1e-5)
    store.close()
