"""Pruning leaves out what a near row repeats, nothing else, and measures rightly what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mnemic
from mnemic.errors import UsageError
from mnemic.stores import References, Source, Store, StoreConfig, Where, open_store
from mnemic.stores.prune import Sample, cost, held_out, prune_store, usual_distance, votes
from tests.unit.stores.building import BYTES, corpus, everything, small


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
            for other, token, _ in kept
            if token == value and np.linalg.norm(np.frombuffer(other, np.float32) - here) < radius
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
        assert len(expected) == 3, "one of each token"
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
                for other, token, _ in kept
                if token == value
            ]
            assert min(distances) < radius + 1e-5


def test_the_usual_distance_is_that_to_the_nearest_other_row() -> None:
    store = clustered("l2")
    keys = np.stack([np.frombuffer(key, np.float32) for key, _, _ in rows_of(store)]).astype(float)
    distances = np.linalg.norm(keys[:, None] - keys, axis=-1) + np.diag(np.full(len(keys), np.inf))
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
