"""The store on a real Milvus server: index, batches, manifests. What all stores do: tests/contract/test_store.py."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.stores import References, Store, StoreConfig, Where, open_store
from mnemic.stores.milvus import index, names, server, snapshot, store
from mnemic.stores.milvus.manifest import Manifest
from tests.contract.stores import rows
from tests.contract.test_store import assert_same_answers
from tests.unit.stores.milvus import DIM, assert_whole, everything, fill, on_server, queries

# Index


def test_the_index_grows_with_the_rows_and_stays_exact_on_demand(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "EXACT_ROWS", 3000)
    monkeypatch.setattr(index, "LISTS", 16)
    one, exact = make()
    fill(one, exact, count=2000)
    assert one.summary().index == {"kind": "exact", "recall": 1.0, "rows": 0}
    fill(one, exact, count=4000, seed=1)
    found = one.summary().index
    assert (found["kind"], found["rows"]) == ("IVF16,Flat", 6000)
    assert found["recall"] >= 0.95
    assert_same_answers(one, exact, queries(), 50)
    assert_same_answers(one, exact, queries(), 50, "red")

    truth = exact.search(queries(50), 32).ids.tolist()
    recalls = []
    for dial in (0.3, 0.9):
        ids = one.search(queries(50), 32, recall=dial).ids.tolist()
        recalls.append(np.mean([len({*found} & {*true}) / 32 for found, true in zip(ids, truth, strict=True)]))
        assert recalls[-1] > dial - 0.15
    assert recalls[0] < recalls[1], "the dial says how many lists are looked into"
    assert one.search(queries(1), 2000, recall=0.3).mask.all(), "as many as were asked for are found"

    for each in (one, exact):
        each.delete("red")
        each.compact(rebuild=True)
    assert one.summary().index["kind"] == "IVF16,Flat", "an index that was made stays"
    assert one._manifest.measured == len(exact) < 6000
    assert_same_answers(one, exact, queries(), 50)


def test_rows_outside_of_the_index_are_searched_exactly(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Any
    one, exact = make(index="IVF16,Flat", dim=64)
    for seed in range(2):  # Milvus searches so many in lists of its own, of which it looks into an eighth
        some = rows(np.random.default_rng(seed), 20_000, dim=64)
        for each in (one, exact):
            each.add(*some)
            each.commit(index=False)
    asked = np.random.default_rng(9).standard_normal((5, 64))
    assert one.summary().index == {"kind": "IVF16,Flat", "recall": 1.0, "rows": 0}
    assert_same_answers(one, exact, asked, 50)
    with open_store(one.address) as again:
        assert again.commit() == one.version
        assert again.summary().index["rows"] == 40_000
        assert_same_answers(again, exact, asked, 50)

    client, states = one._server._client, [[SimpleNamespace(index_id=0, num_rows=5000)]] * 2
    loaded = client.list_loaded_segments
    monkeypatch.setattr(client, "list_loaded_segments", lambda *a, **b: states.pop() if states else loaded(*a, **b))
    one._server.settle(one.config, "IVF16,Flat")
    assert states == [], "it waits until the index is in use"


def test_searches_wait_for_what_was_committed(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Any = make()[0]
    times = []
    client = one._server._client
    search = client.search
    for change in (lambda: fill(one), lambda: fill(one, seed=1), lambda: (one.delete("red"), one.commit())):
        change()
        with open_store(one.address) as reader:
            assert reader._manifest.time == one._manifest.time > max(times, default=0)
        times.append(one._manifest.time)
        asked: dict[str, Any] = {}
        monkeypatch.setattr(client, "search", lambda *a, asked=asked, **b: asked.update(b) or search(*a, **b))
        one.search(queries(), 3)
        assert (asked["consistency_level"], asked["guarantee_timestamp"]) == ("Customized", times[-1])
    monkeypatch.setattr("pymilvus.client.ts_utils.get_collection_ts", lambda *_: None)  # another pymilvus
    fill(one, seed=2)
    monkeypatch.setattr(client, "search", lambda *a, asked=asked, **b: asked.update(b) or search(*a, **b))
    assert one.search(queries(), 60).mask.sum() == 5 * min(60, len(one))
    assert asked["consistency_level"] == "Strong"


def test_a_given_index_is_used_and_what_milvus_has_not_is_refused(new_address: Callable[[], str]) -> None:
    with open_store(new_address(), StoreConfig(dim=DIM, index="IVF32,Flat")) as one:
        fill(one)
        assert one.summary().index["kind"] == "IVF32,Flat"
    for options, said in (
        ({"keys": "codes"}, "keeps its keys"),
        ({"transform": "opq"}, "has none"),
        ({"index": "IVF99999,Flat"}, "a store on Milvus has"),
        ({"index": "HNSW32"}, "a store on Milvus has"),
        ({"dim": 40_000}, "up to 32768"),
    ):
        with pytest.raises(UsageError, match=said):
            open_store(new_address(), StoreConfig(**{"dim": DIM, **options}))


def test_float16_rounds(make: Callable[..., tuple[Store, Store]]) -> None:
    one, exact = make(keys="float16")
    fill(one, exact)
    np.testing.assert_array_equal(one.get(range(30)).keys, exact.get(range(30)).keys)
    assert_same_answers(one, exact, queries(), 7)


# Batches and limits


def test_small_batches_give_the_same(make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (server, "MESSAGE_BYTES", 300),
        (snapshot, "MESSAGE_BYTES", 300),
        (server, "QUERIES_AT_ONCE", 2),
        (store, "MESSAGE_BYTES", 300),
        (server, "REMOVED_AT_ONCE", 7),
        (server, "PAGE", 3),
        (names, "PAGE", 3),
        (names, "ASKED_AT_ONCE", 40),
        (names, "REMEMBERED", 2),
    ):
        monkeypatch.setattr(module, name, value)
    one, exact = make()
    fill(one, exact, count=60, sources=20)
    assert_same_answers(one, exact, queries(), 20)
    some = Where(documents=frozenset(f"document {number}" for number in range(0, 20, 2)))
    assert_same_answers(one, exact, queries(), 60, some)
    ids = np.arange(60)[::-1]
    got, wanted = one.get(ids), exact.get(ids)
    np.testing.assert_array_equal(got.keys, wanted.keys)
    assert [got.references[row] for row in range(60)] == [wanted.references[row] for row in range(60)]
    assert one.summary().namespaces == exact.summary().namespaces
    assert one.verify() == []
    assert one.delete(some) == exact.delete(some)
    one.commit(), exact.commit()
    assert_same_answers(one, exact, queries(), 60)


def test_more_than_milvus_gives_is_refused(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = make()
    fill(one, count=20)
    monkeypatch.setattr(snapshot, "MOST_FOUND", 20)
    assert one.search(queries(), 1_000_000).mask.sum() == 5 * 20
    monkeypatch.setattr(snapshot, "MOST_FOUND", 19)
    with pytest.raises(UsageError, match="at most 19 rows"):
        one.search(queries(), 20)
    monkeypatch.setattr(names, "MOST_DELETED", 2)
    with pytest.raises(UsageError, match="more than 2 documents"):
        one.delete(Where(documents=frozenset(f"document {number}" for number in range(3))))
    assert (one.commit(), len(one)) == (1, 20), "nothing of it was done"


def test_rows_beyond_the_buffer_are_on_the_server_and_seen_by_no_one(
    make: Callable[..., tuple[Store, Store]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WAITING_BYTES", 1000)
    one, exact = make()
    fill(one, exact)
    with open_store(one.address) as reader:
        for each in (one, exact):
            for seed in (1, 2):
                each.add(*rows(np.random.default_rng(seed), 40))
            each.add(*rows(np.random.default_rng(3), 5, sources=6))
        assert on_server(one) == everything(one) + 80
        for each in (one, reader):
            assert len(each) == 30
            assert each.search(queries(), 80).ids.max() < 30
            with pytest.raises(UsageError, match="no row has the number 30"):
                each.get([30])
        assert one.delete("red") == exact.delete("red"), "committed ones, ones on the server and ones that wait"
        assert one.delete("red") == exact.delete("red") == 0
        for each in (one, exact):
            each.add(*rows(np.random.default_rng(4), 20))
            each.commit()
        assert_same_answers(one, exact, queries(), 200)
        assert reader.search(queries(), 200).ids.max() < 30, "new rows are seen from the refresh on"
        assert reader.refresh() == one.version
        assert_same_answers(reader, exact, queries(), 200)
    assert_whole(one)


# Deletion


def test_compact_removes_rows_and_names_from_the_segments(make: Callable[..., tuple[Store, Store]]) -> None:
    one, exact = make()
    fill(one, exact, count=100, sources=6)
    for each in (one, exact):
        for number in (0, 2, 4):
            each.delete(Where.document(f"document {number}", "red"))
        each.commit()
    assert_same_answers(one, exact, queries(), 100)
    client: Any = one._server._client
    assert "red" in one._snapshot.names.spaces(), "documents went one by one"
    one.compact()
    assert list(one._snapshot.names.spaces()) == ["blue"]
    assert client.get_collection_stats(one._server.collection)["row_count"] - 1 == everything(one) == len(exact) + 4
    assert_same_answers(one, exact, queries(), 100)
    for each in (one, exact):
        each.add(np.ones((1, DIM)), [7], References.of("document 0", [0], "red"))
        each.commit()
    assert_same_answers(one, exact, queries(), 100, "red")
    assert one.delete(Where()) == len(exact)
    one.commit()
    assert (len(one), everything(one), on_server(one)) == (0, 0, 0)
    assert one.add(np.ones((1, DIM)), [7], References.of("a", [0])).tolist() == [101]


# Manifests


def test_what_is_not_ours_or_too_new_or_damaged_is_refused(
    make: Callable[..., tuple[Store, Store]], new_address: Callable[[], str]
) -> None:
    one: Any = make()[0]
    with pytest.raises(UsageError, match=r"no store at .*: build one"):
        open_store(new_address())
    foreign = new_address()
    client = one._server._client
    client.create_collection(foreign.rpartition("/")[2], dimension=4)
    with pytest.raises(UsageError, match="is no store of mnemic: choose another name"):
        open_store(foreign, StoreConfig(dim=DIM))
    assert client.describe_collection(foreign.rpartition("/")[2])["properties"] == {}

    text = one._server.manifest()
    for bad, said in (
        (text.replace('"schema": 1, "library"', '"schema": 2, "library"', 1), "reads schema 1: install mnemic"),
        (text[:-1], "it is not JSON"),
        ("[]", "not the manifest of a store"),
        (json.dumps({**json.loads(text), "more": 1}), "'more'"),
        (json.dumps({**json.loads(text), "rows": -1}), "numbers that cannot be"),
        (json.dumps({**json.loads(text), "rows": 1}), "numbers that cannot be"),
        (json.dumps({**json.loads(text), "curve": [[1, math.nan]]}), "numbers that cannot be"),
        (json.dumps({**json.loads(text), "index": "IVF0,Flat"}), "numbers that cannot be"),
        (json.dumps({**json.loads(text), "rows": "1"}), "expected a whole number"),
        (json.dumps({**json.loads(text), "config": {"dim": 0}}), "expected 1 to 65536"),
    ):
        one._server.publish(bad)
        with pytest.raises(DamagedError, match=f"the manifest of {one.address} cannot be used: .*{said}"):
            open_store(one.address)
        with pytest.raises(DamagedError):
            one.refresh()
    one._server.publish(text)
    assert one.refresh() == 0
    client.drop_collection(one._server.collection)
    with pytest.raises(MnemicError, match="is gone"):
        one.refresh()


def test_verify_finds_what_is_missing_doubled_or_nameless(make: Callable[..., tuple[Store, Store]]) -> None:
    one: Any = make()[0]
    fill(one)
    assert one.verify() == []
    seen: list[tuple[int, int]] = []
    one.verify(lambda *numbers: seen.append(numbers))
    assert seen == [(30, 30)]
    manifest = Manifest.parse(one._server.manifest())
    one._server.remove("id == 3", 0, lambda: None)
    stray = {**one._snapshot.names._row(0, "x", 1, 77), "id": 4}
    one._server.write([stray], "_default", False, lambda: None)
    one._turn_to(dataclasses.replace(manifest, time=one._server.time))
    assert one.verify()[-1] == "30 rows are there under 29 numbers, where 30 were committed"
    one._server.remove("id == 4", 0, lambda: None)
    one._server.write([stray], "_default", False, lambda: None)
    one._turn_to(dataclasses.replace(manifest, time=one._server.time, rows=29))
    assert one.verify() == ["document number 77 has rows and no name"]
    with pytest.raises(DamagedError, match="row 4 belongs to a document whose name is not there"):
        one.get([4])


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*Manifest.__dataclass_fields__, "format", "schema", "other"]), JUNK)
def test_a_manifest_is_read_exactly_or_refused(entry: str, value: Any) -> None:
    body = json.loads(Manifest(StoreConfig(dim=DIM)).text())
    body[entry] = value
    try:
        manifest = Manifest.parse(json.dumps(body))
    except DamagedError:
        return
    again = json.loads(manifest.text())
    again.pop("library"), body.pop("library")
    assert again == body


@given(st.text())
def test_any_text_is_no_manifest(text: str) -> None:
    with pytest.raises(DamagedError):
        Manifest.parse(text)
