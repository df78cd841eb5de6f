"""What people do with stores that they should not, and what they are told."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.errors import DamagedError, UsageError
from mnemic.stores import References, Source, Store, StoreConfig, Where, open_store


def filled(address: Any, count: int = 400, **options: Any) -> Store:
    store = open_store(address, StoreConfig(**{"dim": 8, **options}))
    keys = np.random.default_rng(0).standard_normal((count, 8))
    store.add(keys, np.arange(count), References.of("a", range(count), "alice"))
    store.commit()
    return store


@pytest.fixture(params=["ram:", "disk"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param if request.param == "ram:" else str(tmp_path / "a.store")


def test_a_closed_store_says_so(address: str) -> None:
    store = filled(address)
    store.close()
    for use in (
        lambda: store.search(np.zeros((1, 8)), 1),
        lambda: store.get([0]),
        lambda: store.add(np.zeros((1, 8)), [1], References.of("b", [0])),
        lambda: store.delete("alice"),
        store.commit,
    ):
        with pytest.raises(UsageError, match="is closed: open it again"):
            use()


def test_names_are_names_and_not_letters(address: str) -> None:
    store = filled(address)
    store.add(np.ones((2, 8)), [1, 2], References.of("a", [0, 1], "al"))
    store.commit()
    assert Where("alice") == Where.of("alice") == Where(["alice"]) == Where(frozenset(["alice"]))
    found = store.search(np.ones((1, 8)), 5, Where("alice"))
    assert all(source.namespace == "alice" for source, _ in store.get(found.ids[0]).references)
    assert store.delete(Where(documents="aa")) == 0
    for wrong in (Source("a", "alice"), 7):
        with pytest.raises(UsageError, match=r"Where\.document"):
            store.search(np.ones((1, 8)), 5, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Where\(\) is all"):
        store.delete(None)  # type: ignore[arg-type]
    assert len(store) == 402


def test_directions_of_any_length(address: str) -> None:
    store = open_store(address, StoreConfig(dim=4, metric="cosine", keys="float32"))
    keys = np.eye(4)[:3] * np.array([[1e20], [1e-30], [1]])
    store.add(keys, [0, 1, 2], References.of("a", range(3)))
    store.commit()
    found = store.search(np.eye(4)[:3] * 1e25, 1)
    assert found.values[:, 0].tolist() == [0, 1, 2]
    np.testing.assert_allclose(found.scores[:, 0], 1, rtol=1e-6)


@pytest.mark.parametrize("index", ["auto", "IVF4,Flat", "IVF4,PQ4x4fs", "OPQ4,IVF4,PQ4x4fs"])
def test_more_results_than_rows(tmp_path: Path, index: str) -> None:
    with filled(tmp_path / "a.store", index=index) as store:
        found = store.search(np.ones((2, 8)), 1000, recall=1.0)
        assert found.mask.sum(1).tolist() == [400, 400]


@pytest.mark.parametrize("index", ["HNSW16", "Flat", "PQ4", "LSH", "PCA4,Flat", "IVF4,Flat,RFlat", "IDMap,Flat"])
def test_an_index_that_is_no_inverted_file_is_refused(tmp_path: Path, index: str) -> None:
    with pytest.raises(UsageError, match="expected auto, exact, or an inverted file"):
        open_store(tmp_path / "a.store", StoreConfig(dim=8, index=index))
    assert not (tmp_path / "a.store").exists()


@pytest.mark.parametrize("index", ["IVF4,PQ4", "IVF4,PQ4x4fs", "PCA4,IVF4,Flat"])
def test_too_few_rows_to_train_wait_for_more(tmp_path: Path, index: str) -> None:
    with filled(tmp_path / "a.store", 30, index=index) as store:
        assert store.summary().index["kind"] == "exact"
        assert store.search(np.ones((1, 8)), 30).mask.all()


def test_an_index_is_trained_on_rows_that_are_left(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a.store", StoreConfig(dim=8, index="IVF4,Flat"))
    rng = np.random.default_rng(0)
    for name, count in (("gone", 3000), ("left", 170)):
        store.add(rng.standard_normal((count, 8)), np.arange(count), References.of(name, range(count), name))
    store.commit(index=False)
    store.delete("gone")
    store.commit()
    assert store.summary().index["kind"] == "IVF4,Flat"
    assert store.search(np.ones((1, 8)), 170, recall=1.0).mask.all()
    store.close()


def test_an_index_that_is_missing_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    filled(path, index="IVF4,Flat").close()
    for damage in (lambda index: index.unlink(), lambda index: index.write_bytes(b"cut")):
        (index,) = path.glob("index-*")
        damage(index)
        with open_store(path) as store:
            assert len(store.get(range(400)).values) == 400
            with pytest.raises(DamagedError, match="--rebuild"):
                store.search(np.ones((1, 8)), 1)
            store.compact(rebuild=True)
            assert store.search(np.ones((1, 8)), 400, recall=1.0).mask.all()
            assert store.verify() == []


def test_verify_reads_again_what_was_read_before(tmp_path: Path) -> None:
    with filled(tmp_path / "a.store") as store:
        store.search(np.ones((1, 8)), 3)
        (values,) = (tmp_path / "a.store").glob("*.values")
        data = bytearray(values.read_bytes())
        data[0] ^= 1
        with open(values, "r+b") as file:
            file.write(data)
        assert [problem for problem in store.verify() if "values" in problem]


def test_nothing_of_a_forgotten_name_is_in_any_file(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    origin = {"corpus": '{"path": "secret.txt", "namespace": "alice"}', "layer": "ffn"}
    for namespace, left in (("alice", "bob"), ("bob", "alice")):
        shutil.rmtree(path, ignore_errors=True)
        with open_store(path, StoreConfig(dim=8, origin=origin)) as store:
            for name in ("alice", "bob"):
                store.add(np.ones((3, 8)), [1, 2, 3], References.of(f"{name}.txt", range(3), name))
            store.commit()
            store.delete(namespace)
            store.compact()
            assert store.config.origin["layer"] == "ffn"
            assert ("corpus" in store.config.origin) == (namespace == "bob")
        everything = b"".join(file.read_bytes() for file in path.iterdir() if file.name != "lock")
        assert namespace.encode() not in everything
        assert left.encode() in everything


def test_a_store_of_another_origin_is_not_taken_for_this(tmp_path: Path) -> None:
    filled(tmp_path / "a.store", origin={"model": "one", "model_fingerprint": "11"}).close()
    with pytest.raises(UsageError, match="another model"):
        open_store(tmp_path / "a.store", StoreConfig(dim=8, origin={"model_fingerprint": "22"}))
    with open_store(tmp_path / "a.store", StoreConfig(dim=8, recall=0.5)) as store:
        assert store.config.recall == 0.5


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda store: store.search(np.ones((1, 8)), 10**9), "from 1 to"),
        (lambda store: store.search([["a"] * 8], 1), "are no numbers"),
        (lambda store: store.search([[1.0], [1.0, 2.0]], 1), "are no numbers"),
        (lambda store: store.search(np.ones(8), 1), "a vector in each row"),
        (lambda store: store.search(np.ones((1, 8)), 1, recall="0.9"), "above 0"),
        (lambda store: store.search(np.full((1, 8), 1e30), 1), "too large to be compared"),
        (lambda store: store.add(np.ones((1, 8)), [1], [("a", 0)]), "give References"),
    ],
)
def test_one_sentence_for_each_mistake(address: str, use: Any, sentence: str) -> None:
    with filled(address) as store, pytest.raises(UsageError, match=sentence):
        use(store)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    store = filled(tmp_path / "a.store")
    shutil.rmtree(tmp_path / "a.store")
    with pytest.raises(DamagedError, match="moved or removed"):
        store.refresh()
    with pytest.raises(UsageError, match="null character"):
        open_store("a\0b")


def test_threads_ask_for_many_namespaces_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a.store", StoreConfig(dim=8, keys="float32"))
    rng = np.random.default_rng(0)
    for name in "abcdefghij":
        store.add(rng.standard_normal((20, 8)), np.full(20, ord(name)), References.of(name, range(20), name))
    store.commit()
    wrong: list[Any] = []

    def ask(names: str) -> None:
        try:
            for name in names * 40:
                found = store.search(np.ones((1, 8)), 20, name)
                if not (found.mask.all() and (found.values == ord(name)).all()):
                    wrong.append(name)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(names,)) for names in ("abcdefghij", "jihgfedcba", "acegibdfhj")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
