"""Pruning leaves out what a near row repeats, nothing else, and measures rightly what that costs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mnemic
import mnemic.stores.known as known_documents
from mnemic.cli.store.prune import in_words
from mnemic.data import tokenize_corpus
from mnemic.errors import UsageError
from mnemic.stores import References, Source, Store, StoreConfig, Where, open_store, prune
from mnemic.stores.known import documents_in
from mnemic.stores.prune import SAMPLE, Sample, cost, held_out, prune_store, usual_distance, votes
from tests.unit.stores.building import BYTES, TEXTS, corpus, everything, small


def clustered(metric: str, count: int = 400, seed: int = 0) -> Store:
    """Rows in tight clusters with few tokens, of two documents, some of them deleted."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((30, 6)) * 3
    keys = centres[rng.integers(0, 30, count)] + rng.standard_normal((count, 6)) * 0.3
    store = open_store("ram:", StoreConfig(dim=6, metric=metric, keys="float32"))
    sources = [Source("a"), Source("b", "blue"), Source("gone")]
    which = np.sort(rng.integers(0, 3, count))
    store.add(keys, rng.integers(0, 3, count), References(sources, which, np.arange(count)))
    store.delete(Where.document("gone"))
    store.commit()
    return store


def rows_of(store: Store) -> list[tuple[bytes, int, tuple[Source, int]]]:
    found = []
    for id in range(10_000):
        try:
            row = store.get([id])
        except UsageError:
            continue
        found.append((row.keys.tobytes(), int(row.values[0]), row.references[0]))
        if len(found) == len(store):
            break
    return found


def greedy(store: Store, radius: float) -> list[Any]:
    """The same by its definition, with every row looked at."""
    kept: list[Any] = []
    for key, value, place in rows_of(store):
        here = np.frombuffer(key, np.float32).astype(float)
        near = [
            other
            for other, token, (source, _) in kept
            if token == value
            and source.namespace == place[0].namespace
            and np.linalg.norm(np.frombuffer(other, np.float32) - here) < radius
        ]
        if not near:
            kept.append((key, value, place))
    return kept


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("closer", [0.0, 0.7, 2.0, 1e9])
def test_rows_are_merged_by_the_definition(metric: str, closer: float) -> None:
    store = clustered(metric)
    before = rows_of(store)
    pruned = prune_store(store, "ram:", closer=closer, neighbours=400)
    expected = greedy(store, closer * usual_distance(store))
    assert [row[1:] for row in rows_of(pruned.store)] == [row[1:] for row in expected]
    if metric != "cosine":  # which makes keys anew that are of length 1 already
        assert rows_of(pruned.store) == expected
    assert rows_of(store) == before
    assert pruned.report["rows_before"] == len(before)
    assert pruned.report["rows_after"] == len(expected)
    if closer == 0:
        assert len(expected) == len(before)
    elif closer == 1e9:
        assert len(expected) == 6, "one of each token in each namespace"
    else:
        assert 30 < len(expected) < len(before)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_with_few_neighbours_each_row_that_goes_has_one_that_stays_for_it(metric: str) -> None:
    store = clustered(metric)
    radius = 1.5 * usual_distance(store)
    kept = rows_of(prune_store(store, "ram:", closer=1.5, neighbours=5).store)
    assert 30 < len(kept) < len(store)
    for key, value, place in rows_of(store):
        if (value, place) not in {row[1:] for row in kept}:
            distances = [
                np.linalg.norm(np.frombuffer(other, np.float32) - np.frombuffer(key, np.float32))
                for other, token, (source, _) in kept
                if token == value and source.namespace == place[0].namespace
            ]
            assert min(distances) < radius + 1e-5


def test_the_usual_distance_is_that_to_the_nearest_other_row() -> None:
    store = clustered("l2")
    keys = np.stack([np.frombuffer(key, np.float32) for key, _, _ in rows_of(store)]).astype(float)
    spaces = np.array([source.namespace for _, _, (source, _) in rows_of(store)])
    distances = np.linalg.norm(keys[:, None] - keys, axis=-1) + np.diag(np.full(len(keys), np.inf))
    distances[spaces[:, None] != spaces] = np.inf
    assert usual_distance(store) == pytest.approx(np.median(distances.min(1)), rel=1e-4)


def test_equal_rows_become_one() -> None:
    store = open_store("ram:", StoreConfig(dim=2, keys="float32"))
    keys = np.repeat(np.array([[0.0, 0], [9, 9], [5, 0]]), [5, 1, 1], axis=0)
    store.add(keys, [1, 1, 1, 1, 2, 2, 1], References.of("a", np.arange(7)))
    store.commit()
    assert 5 < usual_distance(store) < 10, "doubles do not count"
    pruned = prune_store(store, "ram:", closer=0.0)
    assert [(value, place[1]) for _, value, place in rows_of(pruned.store)] == [(1, 0), (2, 4), (2, 5), (1, 6)]
    only_doubles = open_store("ram:", StoreConfig(dim=2))
    only_doubles.add(np.ones((9, 2)), np.ones(9, int), References.of("a", np.arange(9)))
    only_doubles.commit()
    assert usual_distance(only_doubles) == 0
    assert len(prune_store(only_doubles, "ram:").store) == 1


def test_the_cost_is_counted_rightly() -> None:
    rng = np.random.default_rng(1)
    store = clustered("l2")
    pruned = prune_store(store, "ram:", closer=2.0, neighbours=50).store
    sample = Sample(rng.standard_normal((60, 6)).astype(np.float32) * 3, rng.integers(0, 3, 60))
    figures = cost(store, pruned, sample, 7)
    guesses = []
    for one, when in ((store, "before"), (pruned, "after")):
        keys, values = (
            np.stack(column)
            for column in zip(
                *((np.frombuffer(key, np.float32).astype(float), value) for key, value, _ in rows_of(one)), strict=True
            )
        )
        guess, right = [], 0
        for query, token in zip(sample.keys, sample.values, strict=True):
            squares = ((keys - query) ** 2).sum(1)
            nearest = np.argsort(squares)[:7]
            weights = np.exp(squares[nearest].min() - squares[nearest])
            guess.append(max(range(3), key=lambda t: weights[values[nearest] == t].sum()))
            right += token in values[nearest]
        guesses.append(np.array(guess))
        assert figures[f"recall_{when}"] == pytest.approx(right / 60)
        assert figures[f"accuracy_{when}"] == pytest.approx((guesses[-1] == sample.values).mean())
    assert figures["changed"] == pytest.approx((guesses[0] != guesses[1]).mean())
    assert 0 < figures["changed"] < 1


def test_an_empty_store_votes_for_nothing() -> None:
    store = open_store("ram:", StoreConfig(dim=2))
    assert votes(store.search(np.ones((3, 2)), 4)).tolist() == [-1, -1, -1]


def test_on_disk_beside_the_old_store(tmp_path: Path) -> None:
    model = small()
    store = mnemic.build_store(model, BYTES, corpus(), tmp_path / "whole", window=8)
    sample = held_out(model, BYTES, store, corpus({"new.txt": "a text that the store has not seen"}), "train", rows=20)
    assert sample.keys.shape == (len(sample.values), 16)
    assert 20 <= len(sample.values) <= 36
    done = mnemic.prune_store(store, tmp_path / "part", closer=1.2, commit_rows=10, sample=sample)
    assert done.report["held_out"]["contexts"] == len(sample.values)
    done.store.close()
    with open_store(tmp_path / "part", model=model, tokenizer=BYTES) as part:
        assert 0 < len(part) == done.report["rows_after"] < len(store) == 128
        assert set(everything(part)[2]) < set(everything(store)[2])
        assert part.config == store.config
    with pytest.raises(UsageError, match="has rows already"):
        mnemic.prune_store(store, tmp_path / "part")
    with pytest.raises(UsageError):  # nor can a build go on with what is not all there
        mnemic.build_store(model, BYTES, corpus(), tmp_path / "part", window=8)
    store.close()


def test_what_cannot_be_pruned() -> None:
    with pytest.raises(UsageError, match="has no rows"):
        prune_store(open_store("ram:", StoreConfig(dim=2)), "ram:")
    with pytest.raises(UsageError, match="keeps codes instead of keys"):
        prune_store(open_store("ram:", StoreConfig(dim=2, keys="codes")), "ram:")
    for option in ({"closer": -1.0}, {"k": 0}, {"neighbours": 0}):
        with pytest.raises(UsageError, match=next(iter(option))):
            prune_store(clustered("l2"), "ram:", **option)


# Namespaces


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_no_row_stays_for_one_of_another_namespace(kind: str, tmp_path: Path) -> None:
    keys = np.random.default_rng(0).standard_normal((50, 8))
    store = open_store("ram:" if kind == "ram" else tmp_path / "whole", StoreConfig(dim=8))
    for name in ("alice", "bob"):
        twice = np.r_[np.arange(50), np.arange(10)]
        store.add(keys[twice], twice, References.of(name, np.arange(60), name))
    store.commit()
    assert usual_distance(store) > 0.5, "the same row of another namespace is no neighbour"
    done = prune_store(store, "ram:" if kind == "ram" else tmp_path / "part", closer=0.1)
    assert done.report["namespaces"] == {name: {"rows_before": 60, "rows_after": 50} for name in ("alice", "bob")}
    assert done.store.summary().namespaces == {"alice": 50, "bob": 50}
    assert done.store.search(keys[:1], 1, "bob").mask.all()
    done.store.close()
    store.close()


# What is cut short, and what was there before


def disk_store(path: Path, rows: int = 60, **settings: Any) -> Store:
    store = open_store(path, StoreConfig(dim=4, **settings))
    store.add(np.random.default_rng(0).standard_normal((rows, 4)), np.arange(rows), References.of("a", np.arange(rows)))
    store.commit()
    return store


KILLED = """
import os, signal, sys
from mnemic.stores import known, open_store, prune
known.BLOCK = 10
decide, left = prune._decide, [4]

def killed(*arguments):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    decide(*arguments)

prune._decide = killed
prune.prune_store(open_store(sys.argv[1]), sys.argv[2], commit_rows=10)
"""


def test_killed_it_leaves_nothing_of_that_name_and_can_be_run_again(tmp_path: Path) -> None:
    store = disk_store(tmp_path / "whole")
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "whole", tmp_path / "part"], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "part").exists()
    prune_store(store, tmp_path / "part", closer=0.0).store.close()
    with open_store(tmp_path / "part") as part:
        assert len(part) == len(store)
        assert part.verify() == []
    assert sorted(item.name for item in tmp_path.iterdir()) == ["part", "whole"]


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "an empty store"])
def test_broken_off_it_leaves_what_was_there(there: str, tmp_path: Path, monkeypatch: Any) -> None:
    store, target = disk_store(tmp_path / "whole"), tmp_path / "part"
    if there == "an empty folder":
        target.mkdir()
    elif there == "an empty store":
        open_store(target, store.config).close()
    before = sorted(item.name for item in target.iterdir()) if target.exists() else None
    decide, calls = prune._decide, []

    def broken_off(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        decide(*arguments)

    monkeypatch.setattr(known_documents, "BLOCK", 10)
    monkeypatch.setattr(prune, "_decide", broken_off)
    with pytest.raises(KeyboardInterrupt):
        prune_store(store, target, commit_rows=10)
    after = sorted(item.name for item in target.iterdir()) if target.exists() else None
    assert [name for name in after or [] if name != "lock"] == [name for name in before or [] if name != "lock"]
    assert sorted(item.name for item in tmp_path.iterdir()) == (["part", "whole"] if before is not None else ["whole"])
    done = prune_store(store, target, closer=0.0)
    assert len(done.store) == 60
    done.store.close()


def test_elsewhere_all_rows_come_in_one_commit(monkeypatch: Any) -> None:
    monkeypatch.setattr(known_documents, "BLOCK", 10)
    done = prune_store(clustered("l2"), "ram:", closer=0.0, commit_rows=10)
    assert done.store.summary().version == 1


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    store, target = disk_store(tmp_path / "whole"), tmp_path / "letters"
    target.mkdir()
    (target / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="files that are no store's"):
        prune_store(store, target)
    assert (target / "letter.txt").read_text() == "dear"
    with pytest.raises(UsageError, match="is a file"):
        prune_store(store, target / "letter.txt")
    with pytest.raises(UsageError, match="has rows already"):
        prune_store(store, tmp_path / "whole")
    assert len(open_store(tmp_path / "whole")) == 60


@pytest.mark.parametrize("name", ["model_fingerprint", "memory_fingerprint", "tokenizer_fingerprint", "layer"])
def test_an_empty_store_for_rows_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    store = disk_store(tmp_path / "whole", origin={"model": "A", name: "aaa"})
    for number, origin in enumerate(({"model": "B", name: "bbb"}, {})):
        target = tmp_path / f"other {number}"
        open_store(target, StoreConfig(dim=4, origin=origin)).close()
        with pytest.raises(UsageError, match=r"made with another|rows with "):
            prune_store(store, target)
        with open_store(target) as there:
            assert (len(there), there.config.origin) == (0, origin)
    open_store(tmp_path / "same", StoreConfig(dim=4, origin={"model": "renamed", name: "aaa"})).close()
    with prune_store(store, tmp_path / "same").store as done:
        assert done.config.origin == store.config.origin


# Few rows left


@pytest.mark.parametrize("left", [1, 3, 4 * SAMPLE + 50])
def test_a_store_of_which_most_was_deleted(left: int) -> None:
    rng = np.random.default_rng(0)
    store = open_store("ram:", StoreConfig(dim=4, keys="float32"))
    for name, rows in (("gone", 10_001), ("here", left), ("gone", 10_001)):
        store.add(rng.standard_normal((rows, 4)), np.arange(rows), References.of(name, np.arange(rows)))
    store.delete(Where.document("gone"))
    store.commit()
    assert (usual_distance(store) > 0) == (left > 1)
    if left <= SAMPLE:
        assert len(prune_store(store, "ram:", closer=0.0).store) == left


# Held-out text


LONG = {
    f"{number}.txt": f"number {number}: " + "so it was, and so it is, and so it will be. " * 5 for number in range(3)
}


def known(store: Store, texts: dict[str, str]) -> set[str]:
    tokens = tokenize_corpus(corpus(texts).documents("train"), BYTES)
    return {tokens.id(number) for number in documents_in(store, tokens)}


def test_documents_that_a_store_has_are_recognised() -> None:
    model = small()
    store = mnemic.build_store(model, BYTES, corpus({**TEXTS, **LONG}), "ram:", window=8)
    assert known(store, TEXTS) == set(TEXTS)
    assert known(store, {"renamed.txt": TEXTS["a.txt"]}) == {"renamed.txt"}
    assert known(store, {"0.txt": LONG["0.txt"][60:160]}) == {"0.txt"}, "a part of a document"
    assert known(store, {"a.txt": "the memory reads what another segment wrote"}) == set(), "its name says nothing"
    assert known(store, {"0.txt": LONG["0.txt"].replace("number", "figure")}) == set()


def test_documents_are_recognised_where_rows_are_left_out() -> None:
    whole = mnemic.build_store(small(), BYTES, corpus(), "ram:", window=8)
    store = open_store("ram:", whole.config)
    rows = whole.get(np.arange(0, len(whole), 3))
    store.add(rows.keys, rows.values, rows.references)
    store.commit()
    assert known(store, {"a.txt": TEXTS["a.txt"], "b.txt": "and forgives", "new.txt": "new"}) == {"a.txt"}


def test_pieces_are_found_across_the_blocks_of_a_store(monkeypatch: Any) -> None:
    store = mnemic.build_store(small(), BYTES, corpus(LONG), "ram:", window=8)
    monkeypatch.setattr(known_documents, "BLOCK", 5)
    assert known(store, {"other name": LONG["1.txt"]}) == {"other name"}


def test_the_cost_is_measured_on_text_that_the_store_does_not_have() -> None:
    model = small()
    store = mnemic.build_store(model, BYTES, corpus(), "ram:", window=8)
    new = "nothing of the kind was ever read"
    sample = held_out(model, BYTES, store, corpus({**TEXTS, "new.txt": new}), "train")
    assert sample.left_out == tuple(TEXTS)
    assert sorted(sample.values.tolist()) == sorted([*new.encode(), BYTES.eos_token_id])
    done, rows = prune_store(store, "ram:", sample=sample), {"rows_before": 2, "rows_after": 1}
    assert done.report["held_out"]["left_out"] == list(TEXTS)
    text = in_words("s", {**done.report, "namespaces": {"a": rows, "b": rows}})
    assert "not measured on, because the store has it: a.txt, b.txt, c.txt, d.txt (4)" in text
    assert "contexts of text that the store does not have" in text
    assert "\n  b: 1 of 2 rows\n" in text
    with pytest.raises(UsageError, match="has all of tiny, split train"):
        held_out(model, BYTES, store, corpus(), "train")
