"""The contract of a store: every kind gives the same answers as one that looks at every row."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mnemic.errors import UsageError
from mnemic.stores import References, Source, Store, StoreConfig, Where, open_store
from tests.contract.stores import Kind, kind, kinds, rows


@pytest.fixture(params=kinds())
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return kind(request.param, tmp_path, lambda: request.getfixturevalue("milvus_server"))


def oracle(config: StoreConfig) -> Store:
    return open_store("ram:", config)


def both(stores: Kind, **options: Any) -> tuple[Store, Store]:
    store = stores.make(**options)
    return store, oracle(store.config)


def assert_same_answers(store: Store, exact: Store, queries: Any, k: int, where: Any = None) -> None:
    """Equal scores, and equal rows wherever scores do not tie."""
    found, wanted = store.search(queries, k, where, recall=1.0), exact.search(queries, k, where)
    np.testing.assert_array_equal(found.mask, wanted.mask)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=2e-4, atol=2e-4)
    assert (found.ids.dtype, found.scores.dtype) == (np.int64, np.float32)
    assert (found.ids >= 0).all()
    assert np.isneginf(found.scores[~found.mask]).all()
    for query in range(len(queries)):
        mask = wanted.mask[query]
        assert len(set(found.ids[query][mask])) == mask.sum(), "a row was found twice"
        near = np.abs(np.diff(wanted.scores[query][mask])) < 1e-3
        alone = np.flatnonzero(~(np.r_[False, near] | np.r_[near, True])) if mask.any() else []
        np.testing.assert_array_equal(found.ids[query][alone], wanted.ids[query][alone])
        np.testing.assert_array_equal(found.values[query][alone], wanted.values[query][alone])


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_search_is_exact_for_few_rows(stores: Kind, metric: str) -> None:
    rng = np.random.default_rng(0)
    store, exact = both(stores, metric=metric)
    some = rows(rng, 300)
    for one in (store, exact):
        one.add(*some)
        one.commit()
    queries = rng.standard_normal((7, 8)).astype(np.float32)
    for k in (1, 5, 300, 400):
        assert_same_answers(store, exact, queries, k)
    again = stores.again(store)
    assert_same_answers(again, exact, queries, 5)
    assert len(again) == 300
    again.close()


def test_rows_come_back_with_their_references(stores: Kind) -> None:
    store = stores.make()
    keys, values, references = rows(np.random.default_rng(1), 50)
    ids = store.add(keys, values, references)
    np.testing.assert_array_equal(ids, np.arange(50))
    store.commit()
    store = stores.again(store)
    asked = np.array([49, 0, 7, 7, 20])
    got = store.get(asked)
    assert got.keys is not None
    np.testing.assert_array_equal(got.keys, keys[asked])
    np.testing.assert_array_equal(got.values, values[asked])
    assert [got.references[row] for row in range(5)] == [references[int(row)] for row in asked]
    assert len(store.get([]).values) == 0
    store.close()


def test_nothing_is_seen_before_commit(stores: Kind) -> None:
    store = stores.make()
    some = rows(np.random.default_rng(2), 10)
    assert not store.search(some[0], 3).mask.any()
    before = store.commit()
    store.add(*some)
    assert len(store) == 0
    assert not store.search(some[0], 3).mask.any()
    with pytest.raises(UsageError, match="no row"):
        store.get([0])
    assert store.commit() > before
    assert store.search(some[0], 3).mask.all()
    assert store.commit() == store.summary().version, "a commit of nothing makes no new version"
    store.close()


def test_what_was_not_committed_is_dropped(stores: Kind) -> None:
    if not stores.lasting:
        pytest.skip("it ends with its process")
    rng = np.random.default_rng(3)
    store = stores.make()
    store.add(*rows(rng, 5))
    store.commit()
    store.add(*rows(rng, 5))
    store.delete("red")
    store = stores.again(store)
    assert len(store) == 5
    assert store.add(*rows(rng, 2)).tolist() == [5, 6]
    store.close()


def test_search_is_confined(stores: Kind) -> None:
    rng = np.random.default_rng(4)
    store, exact = both(stores)
    some = rows(rng, 90, sources=6)
    for one in (store, exact):
        one.add(*some)
        one.commit()
    queries = some[0][:4]
    for where in ("red", ["red", "blue"], [], "nobody", Where.document("document 2", "red")):
        assert_same_answers(store, exact, queries, 40, where)
    assert_same_answers(store, exact, queries, 40, Where(documents=frozenset(["document 1", "document 4"])))
    found = store.search(queries, 90, "red")
    sources = store.get(found.ids[found.mask]).references
    assert {sources[row][0].namespace for row in range(len(sources))} == {"red"}
    assert not store.search(queries, 3, Where.document("document 2", "blue")).mask.any(), "both must fit"
    store.close()


def test_delete_and_compact(stores: Kind) -> None:
    rng = np.random.default_rng(5)
    store, exact = both(stores)
    for size in (40, 60):
        some = rows(rng, size, sources=6)
        for one in (store, exact):
            one.add(*some)
            one.commit()
    queries = rng.standard_normal((3, 8)).astype(np.float32)
    where = Where.document("document 1", "blue")
    met = int(exact.search(queries[:1], 100, where).mask.sum())
    assert met > 0
    assert store.delete(where) == exact.delete(where) == met
    assert len(store) == 100, "not before the commit"
    store.commit(), exact.commit()
    for _ in range(2):
        assert len(store) == 100 - met
        assert_same_answers(store, exact, queries, 100)
        gone = sorted(set(range(100)) - set(exact.search(queries[:1], 100).ids[0, : 100 - met].tolist()))
        with pytest.raises(UsageError, match=f"no row has the number {gone[0]}"):
            store.get([gone[0]])
        store.compact()
        store = stores.again(store)
    assert store.add(*rows(rng, 1)).tolist() == [100], "numbers are never used again"
    store.commit()
    assert store.delete("nobody") == 0
    store.close()


def test_delete_meets_rows_that_wait_for_commit(stores: Kind) -> None:
    store, exact = both(stores)
    rng = np.random.default_rng(6)
    first, second, third = (rows(rng, 20) for _ in range(3))
    for one in (store, exact):
        one.add(*first)
        one.commit()
        one.add(*second)
        one.delete("red")
        one.add(*third)
        one.commit()
    assert len(store) == len(exact)
    assert_same_answers(store, exact, third[0], 60)
    store.close()


def test_summary(stores: Kind) -> None:
    store = stores.make(origin={"model": "tiny", "layer": "head"})
    keys, values, references = rows(np.random.default_rng(7), 30)
    store.add(keys, values, references)
    version = store.commit()
    store = stores.again(store)
    summary = store.summary()
    assert (summary.rows, summary.version, summary.documents) == (30, version, len(set(references.which.tolist())))
    owners = [references[row][0].namespace for row in range(30)]
    assert summary.namespaces == {name: owners.count(name) for name in ("blue", "red")}
    assert store.config.origin == {"model": "tiny", "layer": "head"}
    assert summary.bytes > 0 or stores.name == "milvus"
    store.close()


def test_torch_tensors_are_taken(stores: Kind) -> None:
    store = stores.make()
    keys = torch.randn(4, 8, dtype=torch.bfloat16)
    store.add(keys, torch.arange(4), References.of("a", range(4)))
    store.commit()
    found = store.search(keys, 1)
    assert found.ids[:, 0].tolist() == found.values[:, 0].tolist() == [0, 1, 2, 3]
    store.close()


BAD = {
    "keys of another width": lambda: (np.zeros((2, 7)), [1, 2], References.of("a", [0, 1])),
    "one key, no list": lambda: (np.zeros(8), [1], References.of("a", [0])),
    "undefined numbers": lambda: (np.full((1, 8), np.nan), [1], References.of("a", [0])),
    "too few values": lambda: (np.zeros((2, 8)), [1], References.of("a", [0, 1])),
    "values that are no tokens": lambda: (np.zeros((1, 8)), [0.5], References.of("a", [0])),
    "a negative value": lambda: (np.zeros((1, 8)), [-100], References.of("a", [0])),
    "too few references": lambda: (np.zeros((2, 8)), [1, 2], References.of("a", [0])),
    "a reference to no document": lambda: (
        np.zeros((1, 8)),
        [1],
        References([Source("a")], np.array([1]), np.array([0])),
    ),
    "a negative position": lambda: (np.zeros((1, 8)), [1], References.of("a", [-1])),
    "no name": lambda: (np.zeros((1, 8)), [1], References.of("", [0])),
    "half a character": lambda: (np.zeros((1, 8)), [1], References.of("\ud800", [0])),
    "a null character": lambda: (np.zeros((1, 8)), [1], References.of("a", [0], "b\x00")),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_rows_are_refused_whole(stores: Kind, what: str) -> None:
    store = stores.make()
    with pytest.raises(UsageError):
        store.add(*BAD[what]())
    store.commit()
    assert len(store) == 0
    store.close()


def test_numbers_beyond_float16_are_refused(stores: Kind) -> None:
    store = stores.make(keys="float16")
    store.add(np.full((1, 8), 65_504.0), [1], References.of("a", [0]))
    with pytest.raises(UsageError, match="too large for float16: use keys = 'float32'"):
        store.add(np.full((1, 8), -65_505.0), [1], References.of("a", [1]))
    store.commit()
    assert len(store) == 1
    assert np.isfinite(store.get([0]).keys).all()
    store.close()


def test_bad_questions_are_refused(stores: Kind) -> None:
    store = stores.make(metric="cosine")
    one = np.ones((1, 8), np.float32)
    for queries, k, options in (
        (np.ones((1, 9)), 1, {}),
        (one, 0, {}),
        (one, 1.5, {}),
        (one, True, {}),
        (np.zeros((1, 8)), 1, {}),
        (np.full((1, 8), np.inf), 1, {}),
        (one, 1, {"recall": 0.0}),
        (one, 1, {"recall": 2.0}),
    ):
        with pytest.raises(UsageError):
            store.search(queries, k, **options)
    assert store.search(np.empty((0, 8)), 3).ids.shape == (0, 3)
    for ids in ([0], [-1], [0.5], [[1]], [2**60]):
        with pytest.raises(UsageError):
            store.get(ids)
    store.close()


def test_names_of_any_script_and_shape(stores: Kind) -> None:
    names = ["../../etc/passwd", "a'b\"c\\d", "Ærøskøbing", "文書 %s {} \n\t", "a" * 300, "' or 1 == 1 or '"]
    store, exact = both(stores)
    rng = np.random.default_rng(8)
    references = References([Source(name, name) for name in names], np.arange(len(names)), np.arange(len(names)))
    keys = rng.standard_normal((len(names), 8)).astype(np.float32)
    for one in (store, exact):
        one.add(keys, np.arange(len(names)), references)
        one.commit()
    store = stores.again(store)
    for number, name in enumerate(names):
        assert store.search(keys[:1], 9, name).ids[0, :1].tolist() == [number]
        assert store.search(keys[:1], 9, Where.document(name, name)).mask.sum() == 1
        assert store.get([number]).references[0] == (Source(name, name), number)
    assert store.delete(Where.document(names[-1], names[-1])) == 1
    store.commit()
    assert len(store) == len(names) - 1
    store.close()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40), st.integers(1, 4)),
        st.tuples(st.just("delete"), st.sampled_from(["red", "blue", "document 0", "document 1"])),
        st.tuples(st.sampled_from(["commit", "compact", "again"])),
    ),
    max_size=12,
)


def test_any_history_gives_the_exact_answers(stores: Kind) -> None:
    examples = max(4, int(os.environ.get("MNEMIC_EXAMPLES", "60")) // stores.effort)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(OPERATIONS, st.sampled_from(["l2", "ip", "cosine"]), st.sampled_from(["float16", "float32"]))
    def history(operations: list[Any], metric: str, dtype: str) -> None:
        if stores.name == "milvus":
            dtype = "float32"
        store, exact = both(stores, metric=metric, keys=dtype)
        rng = np.random.default_rng(len(operations))
        perform: dict[str, Callable[..., None]] = {
            "add": lambda one, some: one.add(*some),
            "delete": lambda one, what: one.delete(
                what if what in ("red", "blue") else Where(documents=frozenset([what]))
            ),
            "commit": lambda one: one.commit(),
            "compact": lambda one: one.compact(),
        }
        for name, *arguments in [*operations, ("commit",)]:
            if name == "again":
                exact.commit(), store.commit()
                store = stores.again(store)
                continue
            if name == "add":
                arguments = [rows(rng, arguments[0], sources=arguments[1])]
            for one in (store, exact):
                perform[name](one, *arguments)
        assert len(store) == len(exact)
        queries = rng.standard_normal((3, 8)).astype(np.float32)
        for where in (None, "red", Where(documents=frozenset(["document 1"]))):
            assert_same_answers(store, exact, queries, 17, where)
        store.close()

    history()
