"""Adding a text to a store: the rows of building it, all of them or none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mnemic
import mnemic.stores.encode
from mnemic.errors import UsageError
from mnemic.stores import Where, open_store
from mnemic.stores.build import add_to_store
from tests.unit.stores.building import BYTES, Stop, corpus, everything, own_rows, small


def test_adding_a_text_gives_the_rows_of_building_it(tmp_path: Path) -> None:
    model = small()
    (tmp_path / "more.txt").write_text("one more text\nof two lines")
    store = mnemic.build_store(model, BYTES, corpus(), tmp_path / "s", window=8, batch_size=2)
    report = add_to_store(store, model, BYTES, str(tmp_path / "more.txt"), namespace="alice", batch_size=2)
    assert (report["added"], report["replaced"], report["rows"]) == (27, 0, 155)
    alone = mnemic.build_store(model, BYTES, str(tmp_path / "more.txt"), "ram:", split="all", window=8, batch_size=2)
    added = store.get(np.arange(128, 155))
    np.testing.assert_array_equal(added.keys, everything(alone)[0])
    np.testing.assert_array_equal(added.values, everything(alone)[1])
    assert added.references[26] == (("more.txt", "alice"), 26)
    with pytest.raises(UsageError, match=r"already has the document 'more.txt' in the namespace 'alice'"):
        add_to_store(store, model, BYTES, str(tmp_path / "more.txt"), namespace="alice")
    add_to_store(store, model, BYTES, str(tmp_path / "more.txt"), namespace="bob")
    (tmp_path / "more.txt").write_text("shorter")
    assert (
        add_to_store(store, model, BYTES, str(tmp_path / "more.txt"), namespace="bob", replace=True)["replaced"] == 27
    )
    assert store.summary().namespaces == {"default": 128, "alice": 27, "bob": 8}
    with pytest.raises(UsageError, match="another model"):
        add_to_store(store, small(1), BYTES, str(tmp_path / "more.txt"))
    store.close()
    mnemic.build_store(model, BYTES, corpus(), tmp_path / "s", window=8, batch_size=2).close()  # finished as before


def test_a_model_knows_a_text_better_once_it_is_added(tmp_path: Path) -> None:
    """Without training: the text's second half is measured, its first half added."""
    model, text = small(), "colourless green ideas sleep furiously, and so do the others. " * 2
    half = len(text) // 2
    (tmp_path / "first.txt").write_text(text[:half])
    (tmp_path / "second.txt").write_text(text[half:])
    with mnemic.build_store(model, BYTES, corpus(), "ram:", metric="l2") as store:
        mnemic.augment(model, mnemic.OutputMemory.knn(store, weight=0.5, k=4))
        figures = {}
        for when in ("before", "after"):
            figures[when] = mnemic.evaluate(model, BYTES, str(tmp_path / "second.txt"), split="all")["perplexity"]
            if when == "before":
                add_to_store(store, model, BYTES, str(tmp_path / "first.txt"))
    assert figures["after"] < 0.5 * figures["before"]


def test_an_interrupted_addition_adds_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    model, real, calls = small(), mnemic.stores.encode.encode_group, iter(range(3))
    store = mnemic.build_store(model, BYTES, corpus(), tmp_path / "s")
    (tmp_path / "more.txt").write_text("abc " * 1000)

    def failing(*args: Any) -> Any:
        if next(calls, None) is None:
            raise Stop
        return real(*args)

    monkeypatch.setattr(mnemic.stores.encode, "encode_group", failing)
    with store, pytest.raises(Stop):
        add_to_store(store, model, BYTES, str(tmp_path / "more.txt"), batch_size=1)
    with open_store(tmp_path / "s") as again:
        assert len(again) == 128
        assert again.delete(Where.document("more.txt")) == 0


def test_a_failed_replacement_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    model, real = small(), mnemic.stores.encode.encode_group
    (tmp_path / "more.txt").write_text("what was there before")
    store = mnemic.build_store(model, BYTES, corpus(), tmp_path / "s")
    add_to_store(store, model, BYTES, str(tmp_path / "more.txt"))
    before = own_rows(tmp_path / "s")
    (tmp_path / "more.txt").write_text("abc " * 1000)
    calls = iter(range(1))

    def failing(*args: Any) -> Any:
        if next(calls, None) is None:
            raise Stop
        return real(*args)

    monkeypatch.setattr(mnemic.stores.encode, "encode_group", failing)
    with pytest.raises(Stop):
        add_to_store(store, model, BYTES, str(tmp_path / "more.txt"), batch_size=1, replace=True)
    with contextlib.suppress(UsageError):  # it is closed
        store.commit()
    with open_store(tmp_path / "s") as other:
        other.delete("nobody")  # the lock is free as well
        other.commit()
    assert own_rows(tmp_path / "s") == before
