"""What a store was told to forget: after `compact` nothing of it is in any file, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from mnemic.errors import UsageError
from mnemic.stores import References, Source, StoreConfig, Where, open_store
from mnemic.stores.disk import indexing

DIM = 8
CONFIGS = {
    "exact": StoreConfig(dim=DIM),
    "exact, float32": StoreConfig(dim=DIM, keys="float32", metric="cosine"),
    "inverted": StoreConfig(dim=DIM, keys="float32", index="IVF4,Flat"),
    "halves": StoreConfig(dim=DIM, index="IVF4,SQfp16", metric="ip"),
    "compressed": StoreConfig(dim=DIM, index="IVF4,PQ4x4fs"),
    "codes": StoreConfig(dim=DIM, keys="codes", index="IVF4,PQ4x4fs"),
    "codes, inner product": StoreConfig(dim=DIM, keys="codes", index="IVF4,PQ4x4fs", metric="ip"),
    "codes, turned": StoreConfig(dim=DIM, keys="codes", index="OPQ4,IVF4,PQ4x4fs"),
    "codes, one by one": StoreConfig(dim=DIM, keys="codes", index="IVF4,PQ4x5"),
}
SECRET = Source("geheimes Dokument Ærøskøbing 文書", "namespace of Mrs Featherstonehaugh")
OTHERS = [
    Source(f"document {number}", ("namespace of Mr Cholmondeley", SECRET.namespace)[number % 2]) for number in range(4)
]


class Rows:
    """Rows whose every number would be recognised in a file."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.known: list[tuple[Source, Any, int, int]] = []

    def of(self, sources: list[Source], count: int, place: float = 0.0) -> tuple[Any, Any, References]:
        """Rows around a place; the first 300 are remembered."""
        keys = self.rng.standard_normal((count, DIM)).astype(np.float32) + np.float32(place)
        values, positions = self.rng.integers(2**30, 2**31, count), self.rng.integers(2**31, 2**32, count)
        which = np.sort(self.rng.integers(0, len(sources), count))
        self.known += [(sources[which[row]], keys[row], values[row], positions[row]) for row in range(min(count, 300))]
        return keys, values, References(sources, which, positions)

    def traces(self, forgotten: Where, config: StoreConfig) -> dict[str, bytes]:
        """Bytes that would give away a row of what was forgotten."""
        found: dict[str, bytes] = {}
        for number, (source, key, value, position) in enumerate(self.known):
            if source not in forgotten:
                continue
            if config.metric == "cosine":
                key = key / np.linalg.norm(key)
            for start in range(0, DIM, 4):
                part, name = key[start : start + 4], f"of row {number} from {start} on"
                found[f"key {name}, halves"] = part.astype("<f2").tobytes()
                found[f"key {name}, floats"] = part[:2].astype("<f4").tobytes()
                found[f"key {name}, rounded"] = part[:2].astype("<f2").astype("<f4").tobytes()
            found[f"value of row {number}"] = np.array(value, "<u4").tobytes()
            found[f"position of row {number}"] = np.array(position, "<u4").tobytes()
        return found

    def names(self, forgotten: Where) -> dict[str, bytes]:
        """Names that only what was forgotten has, as they are and as JSON writes them."""
        names = set[str]().union(*(source for source, *_ in self.known if source in forgotten))
        names -= set[str]().union(*(source for source, *_ in self.known if source not in forgotten))
        return {name: name.encode() for name in names} | {f"{name}, JSON": json.dumps(name).encode() for name in names}


def found_in(folder: Path, traces: dict[str, bytes]) -> list[str]:
    """Where in the files of a folder these bytes are."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return [f"{what} in {name}" for what, trace in traces.items() for name, data in files.items() if trace in data]


FORGOTTEN = {
    "a document": Where.document(*SECRET),
    "a namespace": Where.of(SECRET.namespace),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("what", FORGOTTEN)
def test_nothing_is_left(tmp_path: Path, config: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "UNCOVERED_BYTES", 40 * DIM * 4)
    folder, made, where = tmp_path / "a.store", Rows(0), FORGOTTEN[what]
    with open_store(folder, CONFIGS[config]) as store:
        store.add(*made.of([*OTHERS, SECRET], 300))
        store.commit()  # is trained on the secret rows too, where there is an index
        for count in (60, 20, 10, 5):  # enter the index, or wait outside of it
            store.add(*made.of([*OTHERS[:2], SECRET], count))
            store.commit()
        traces = made.traces(where, CONFIGS[config])
        names = made.names(where)
        assert len(traces) > 200
        assert names
        rows = {name: trace for name, trace in traces.items() if not name.startswith("key")}
        assert len(found_in(folder, rows)) >= len(rows), "they can be found while they are there"
        assert found_in(folder, names)
        old = store.summary().version
        store.delete(where)
        store.commit()
        assert found_in(folder, names), "not before the store is compacted"
        store.compact()
        assert found_in(folder, traces | names) == []
        for version in range(old + 2):
            with pytest.raises(UsageError, match="has no version"):
                open_store(folder, version=version)
        left = sum(source not in where for source, *_ in made.known)
        assert len(store) == left
        found = store.search(np.zeros((1, DIM)) + 1, 1000, recall=1.0)
        assert found.mask.sum() == left
        assert_no_codes_are_left(folder, left)
    assert found_in(folder, traces | names) == []


def assert_no_codes_are_left(folder: Path, rows: int) -> None:
    """In an index with blocks of codes: the places of rows that were taken out are empty."""
    for path in folder.glob("*.faiss"):
        index = faiss.read_index(str(path))
        lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
        assert index.ntotal <= rows
        if not isinstance(lists, faiss.BlockInvertedLists):
            continue
        for number in range(lists.nlist):
            size = lists.list_size(number)
            blocks = -(-size // lists.n_per_block)
            codes = faiss.rev_swig_ptr(lists.get_codes(number), blocks * lists.block_size).reshape(blocks, -1)
            for place in range(size, blocks * lists.n_per_block):
                block, inside = divmod(place, lists.n_per_block)
                assert not lists.packer.unpack_1(codes[block : block + 1], inside).any(), "a code was left"


@pytest.mark.parametrize("config", [name for name in CONFIGS if name.startswith("codes")])
def test_a_row_that_was_a_list_of_its_own(tmp_path: Path, config: str) -> None:
    """The centre of a list is the mean of its rows: of a row that lies far from all others, it is a copy."""
    folder, made = tmp_path / "a.store", Rows(1)
    with open_store(folder, CONFIGS[config]) as store:
        store.add(*made.of(OTHERS, 300))
        store.add(*made.of([SECRET], 1, place=50.0))
        store.commit()
        store.delete(Where.document(*SECRET))
        store.compact()
        assert len(store) == 300
        assert store.search(np.ones((1, DIM)), 300, recall=1.0).mask.all()
    assert found_in(folder, made.traces(Where.document(*SECRET), CONFIGS[config])) == []
    for path in folder.glob("*.faiss"):
        index = faiss.read_index(str(path))
        ivf = faiss.extract_index_ivf(index)
        centres = ivf.quantizer.reconstruct_n(0, ivf.nlist)
        assert np.linalg.norm(centres, axis=1).max() < 50, "the centre is where the row was"


def test_rows_that_were_never_committed(tmp_path: Path) -> None:
    """Taken back before the commit, or left by a writer that was killed or closed too early."""
    folder, made = tmp_path / "a.store", Rows(2)
    where = Where.document(*SECRET)
    with open_store(folder, CONFIGS["exact"]) as store:
        store.add(*made.of(OTHERS, 30))
        store.commit()
        store.add(*made.of([OTHERS[0], SECRET], 20))
        store.delete(where)
        store.commit()
        store.add(*made.of([SECRET], 100_000))
        shutil.copytree(folder, tmp_path / "killed.store")
    traces = made.traces(where, CONFIGS["exact"])
    assert len(found_in(tmp_path / "killed.store", traces)) > 300
    for one in (folder, tmp_path / "killed.store"):
        with open_store(one) as store:
            store.compact()
            assert len(store) == sum(source not in where for source, *_ in made.known)
        assert found_in(one, traces | made.names(where)) == []


@pytest.mark.parametrize("config", ["exact", "inverted", "codes"])
def test_all_is_forgotten(tmp_path: Path, config: str) -> None:
    folder, made = tmp_path / "a.store", Rows(3)
    with open_store(folder, CONFIGS[config]) as store:
        store.add(*made.of([*OTHERS, SECRET], 300))
        store.commit()
        assert store.delete(Where()) == 300
        store.compact()
        assert len(store) == 0
        assert not store.search(np.ones((1, DIM)), 3).mask.any()
        assert found_in(folder, made.traces(Where(), CONFIGS[config]) | made.names(Where())) == []
        assert not [name for name in os.listdir(folder) if name.startswith("rows-")]
        assert store.add(*made.of(OTHERS, 10)).tolist() == list(range(300, 310))
        store.commit()
        assert store.search(np.ones((1, DIM)), 20).mask.sum() == 10
