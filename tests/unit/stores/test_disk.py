"""The disk store beyond the contract: when it has which index, versions, merging, what is kept where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnemic.errors import DamagedError, UsageError
from mnemic.stores import References, Source, Store, StoreConfig, Where, open_store
from mnemic.stores.disk import indexing
from mnemic.stores.disk import store as disk
from mnemic.stores.disk.columns import ColumnWriter
from mnemic.stores.disk.index import choose


def clustered(count: int, dim: int = 16, seed: int = 0) -> np.ndarray[Any, Any]:
    """Keys in clumps, as those of a model are."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((20, dim))
    return (centres[rng.integers(0, 20, count)] + 0.3 * rng.standard_normal((count, dim))).astype(np.float32)


def references(count: int, first: int = 0) -> References:
    """Rows of documents of 50, in turn those of red and of blue."""
    documents = (np.arange(first, first + count)) // 50
    used, which = np.unique(documents, return_inverse=True)
    return References([Source(f"d{n}", ("red", "blue")[n % 2]) for n in used.tolist()], which, np.arange(count) % 50)


def pair(path: Path, count: int = 2000, **options: Any) -> tuple[Store, Store]:
    """A disk store and the oracle with the same rows."""
    config = StoreConfig(**{"dim": 16, "keys": "float32", **options})
    both = (open_store(path, config), open_store("ram:", config))
    for one in both:
        one.add(clustered(count), np.arange(count) % 777, references(count))
        one.commit()
    return both


def recall(store: Store, exact: Store, queries: Any, k: int = 10, where: Any = None, **options: Any) -> float:
    found, wanted = store.search(queries, k, where, **options), exact.search(queries, k, where)
    assert found.mask.sum() == wanted.mask.sum()
    hits = [
        len(set(a[m]) & set(b[n])) for a, m, b, n in zip(found.ids, found.mask, wanted.ids, wanted.mask, strict=True)
    ]
    return sum(hits) / max(wanted.mask.sum(), 1)


def test_new_rows_are_found_before_and_after_the_index_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, exact = pair(tmp_path / "s", index="IVF16,Flat")
    queries = clustered(20, seed=5)
    for step, bound in enumerate((1 << 30, 0)):
        monkeypatch.setattr(indexing, "UNCOVERED_BYTES", bound)
        for one in (store, exact):
            one.add(clustered(500, seed=6 + step), np.arange(500), references(500, 2000 + 500 * step))
            one.commit()
        covered = store.summary().index["rows"]
        assert covered == (2000 if bound else 3000)
        assert recall(store, exact, queries, recall=1.0) == 1.0
        assert recall(store, exact, queries, where="blue", recall=1.0) == 1.0
    for one in (store, exact):
        one.add(clustered(9000, seed=9), np.arange(9000), references(9000, 3000))
        one.commit()
    assert store._snapshot.manifest.index.trained == 12000  # type: ignore[attr-defined]
    assert recall(store, exact, queries, recall=1.0) == 1.0
    store.close()


def test_commit_without_index_and_later_with_it(tmp_path: Path) -> None:
    config = StoreConfig(dim=16, keys="float32", index="IVF16,Flat")
    store = open_store(tmp_path / "s", config)
    store.add(clustered(2000), np.arange(2000), references(2000))
    version = store.commit(index=False)
    assert store.summary().index["kind"] == "exact"
    assert store.search(clustered(1), 5).mask.all()
    assert store.commit() == version + 1
    assert store.summary().index["rows"] == 2000
    assert store.commit() == version + 1
    store.close()


def test_codes_only(tmp_path: Path) -> None:
    store, exact = pair(tmp_path / "s", 4000, keys="codes", index="IVF16,PQ16x4fs")
    assert not list((tmp_path / "s").glob("*.keys"))
    queries = clustered(40, seed=1)
    before = recall(store, exact, queries, 32)
    assert before > 0.5
    row = store.get([3])
    assert row.keys is None
    assert row.values.tolist() == [3]
    with open_store(tmp_path / "s") as reader:
        for one in (store, exact):
            one.delete("red")
            one.commit()
        store.compact()
        assert len(reader) == 4000
        assert reader.search(queries, 3).mask.all(), "its files are open"
    assert len(store) == 2000
    assert store.summary().index["rows"] == 2000
    assert recall(store, exact, queries, 32) > before - 0.1
    assert recall(store, exact, queries, 32, where="red") == 0
    store.close()


def test_index_is_chosen_from_the_rows() -> None:
    kinds = {rows: choose(StoreConfig(dim=128), rows) for rows in (10, 131_072, 131_073, 4_000_000, 5_000_000, 10**9)}
    assert list(kinds.values()) == ["", "", "IVF512,SQfp16", "IVF2048,SQfp16", "IVF4096,PQ64x4fs", "IVF32768,PQ64x4fs"]
    assert choose(StoreConfig(dim=128, keys="float32"), 10**6) == "IVF1024,Flat"
    assert choose(StoreConfig(dim=128, transform="opq"), 10**7) == "OPQ64,IVF4096,PQ64x4fs"
    assert choose(StoreConfig(dim=128, transform="pca"), 10**7) == "PCA64,IVF4096,PQ32x4fs"
    assert choose(StoreConfig(dim=128, index="exact"), 10**7) == ""
    assert choose(StoreConfig(dim=8, index="IVF64,Flat"), 100) == "", "too few rows to train it"


def test_an_index_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    for factory in ("IVF16,PQ7x4fs", "nonsense"):
        with pytest.raises(UsageError, match="FAISS cannot make it"):
            open_store(tmp_path / "s", StoreConfig(dim=16, index=factory))
    assert not list(tmp_path.glob("s/manifest*"))


def test_old_versions(tmp_path: Path) -> None:
    store, _ = pair(tmp_path / "s", 100)
    store.delete("red")
    store.commit()
    old = open_store(tmp_path / "s", version=1)
    assert (len(old), len(store)) == (100, 50)
    with pytest.raises(UsageError, match="opened at version 1"):
        old.add(clustered(1), [1], references(1))
    with pytest.raises(UsageError, match="no version 7: it has 0, 1, 2"):
        open_store(tmp_path / "s", version=7)
    store.compact()
    assert len(old) == 100
    assert old.get([0]).references[0][0] == Source("d0", "red"), "an open version stays"
    with pytest.raises(UsageError, match="no version 1"):
        open_store(tmp_path / "s", version=1)
    old.close()
    store.close()


def test_a_reader_sees_new_versions_when_it_asks(tmp_path: Path) -> None:
    store, _ = pair(tmp_path / "s", 100)
    reader = open_store(tmp_path / "s")
    store.add(clustered(1), [5], References.of("new", [0]))
    store.commit()
    assert len(reader) == 100
    reader.refresh()
    assert len(reader) == 101
    reader.close()
    store.close()


def test_small_segments_are_merged_as_they_come(tmp_path: Path) -> None:
    config = StoreConfig(dim=4, keys="float32")
    store, exact = open_store(tmp_path / "s", config), open_store("ram:", config)
    rng = np.random.default_rng(0)
    for number in range(70):
        rows = (rng.standard_normal((3, 4)), [number] * 3, References.of(f"d{number % 5}", range(3)))
        for one in (store, exact):
            one.add(*rows)
            one.commit()
    segments = store._snapshot.segments  # type: ignore[attr-defined]
    assert len(segments) <= 7
    published = {path.name.partition(".")[0] for path in (tmp_path / "s").glob("rows-*")}
    assert len(published) == 70, "what was merged at once was never part of a version"
    queries = rng.standard_normal((4, 4))
    np.testing.assert_array_equal(store.search(queries, 20).ids, exact.search(queries, 20).ids)
    np.testing.assert_array_equal(store.get(range(210)).values, exact.get(range(210)).values)
    store.close()


def test_large_segments_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SMALL", 100)
    monkeypatch.setattr(disk, "MERGED", 500)
    config = StoreConfig(dim=4, keys="float16")
    store, exact = open_store(tmp_path / "s", config), open_store("ram:", config)
    rng = np.random.default_rng(0)
    for number in range(6):
        rows = (rng.standard_normal((120, 4)), [number] * 120, References.of(f"d{number}", range(120), f"n{number}"))
        for one in (store, exact):
            one.add(*rows)
            one.commit()
    records = store._snapshot.manifest.segments  # type: ignore[attr-defined]
    assert [record.rows for record in records] == [120] * 6
    for one in (store, exact):
        one.delete("n1")
        one.compact()
    records = store._snapshot.manifest.segments  # type: ignore[attr-defined]
    assert [record.rows for record in records] == [360, 240]
    found, wanted = store.get(exact.search(np.zeros((1, 4)), 700).ids[0, :600]), 600
    assert len(found.values) == wanted
    for where in (None, "n4", ["n0", "n5"]):
        queries = rng.standard_normal((3, 4))
        np.testing.assert_allclose(
            store.search(queries, 9, where).scores, exact.search(queries, 9, where).scores, rtol=1e-4
        )
    store.close()


def test_more_rows_than_are_kept_ready_are_looked_at_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, exact = pair(tmp_path / "s", 3000)
    monkeypatch.setattr("mnemic.stores.disk.snapshot.EXACT_BYTES", 1000)
    monkeypatch.setattr("mnemic.stores.disk.segments.CHUNK", 256)
    monkeypatch.setattr("mnemic.stores.disk.segments.pieces.__defaults__", (256,))
    queries = clustered(6, seed=2)
    for where in (None, "red", Where.document("d3", "blue")):
        found, wanted = store.search(queries, 70, where), exact.search(queries, 70, where)
        np.testing.assert_array_equal(found.mask, wanted.mask)
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4, atol=1e-4)
    store.close()


def test_keys_of_one_number(tmp_path: Path) -> None:
    config = StoreConfig(dim=1, index="IVF4,Flat")
    store, exact = open_store(tmp_path / "s", config), open_store("ram:", config)
    keys = np.linspace(0, 1, 300)[:, None]
    for one in (store, exact):
        one.add(keys, np.arange(300), References.of("a", range(300)))
        one.commit()
    np.testing.assert_array_equal(store.search(keys[:9], 3, recall=1.0).values, exact.search(keys[:9], 3).values)
    np.testing.assert_array_equal(store.get([7]).keys, keys[7:8].astype(np.float16))
    store.compact(rebuild=True)
    np.testing.assert_array_equal(store.search(keys[:9], 3, recall=1.0).values, exact.search(keys[:9], 3).values)
    store.close()


def test_two_writers(tmp_path: Path) -> None:
    import os

    first, _ = pair(tmp_path / "s", 10)
    second = open_store(tmp_path / "s")
    with pytest.raises(Exception, match=f"in use by process {os.getpid()} on"):
        second.add(clustered(1), [1], references(1))
    first.close()
    second.add(clustered(1), [1], references(1))
    second.commit()
    assert len(second) == 11
    second.close()


def test_checksums_of_blocks_do_not_depend_on_how_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnemic.stores.disk.columns.BLOCK", 64)
    rows = np.arange(40, dtype=np.uint32).reshape(20, 2)
    sums = []
    for cuts in ([], [3], [8, 16], list(range(20))):
        writer = ColumnWriter(tmp_path / "c", np.uint32, 2)
        for part in np.split(rows, cuts):
            writer.append(part)
        sums.append(writer.finish())
        writer.close()
    assert len(sums[0]) == 3
    assert all(one == sums[0] for one in sums)


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no store at"):
        open_store(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        open_store(tmp_path / "file", StoreConfig(dim=4))
    with pytest.raises(UsageError, match="no store's"):
        open_store(tmp_path, StoreConfig(dim=4))
    store, _ = pair(tmp_path / "s", 10)
    store.close()
    with pytest.raises(UsageError, match="dim = 16, not 8"):
        open_store(tmp_path / "s", StoreConfig(dim=8, keys="float32"))


def test_large_files_are_checked_where_they_are_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnemic.stores.disk.columns.CHECKED_WHOLE", 0)
    monkeypatch.setattr("mnemic.stores.disk.columns.BLOCK", 640)  # 10 keys
    store, _ = pair(tmp_path / "s", 200)
    store.close()
    (file,) = (tmp_path / "s").glob("*.keys")
    data = bytearray(file.read_bytes())
    data[64 * 25 + 3] ^= 1
    file.write_bytes(data)
    store = open_store(tmp_path / "s")
    rows = [0, 19, 30, 199]
    np.testing.assert_array_equal(store.get(rows).keys, clustered(200)[rows])
    with pytest.raises(DamagedError, match="rows 20 to 29"):
        store.get([7, 25])
    assert len(store.verify()) == 1
    store.close()
