"""The automaton: rows found for a token lead to those of the next ones, in place of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.errors import UsageError
from mnemic.memories.output import searching
from mnemic.memories.output.searching import followed, nearest
from mnemic.stores import References, Source, StoreConfig, Where, open_store
from tests.unit.memories.test_output import augmented, byte_model, corpus

__all__ = ["byte_model"]

WIDTH, ROWS, K, TOKENS = 6, 240, 40, 3
SOURCES = [Source(f"document {n}", ("red", "blue")[n % 2]) for n in range(6)]


class Watched:
    """A store that counts what it is asked, and notes the rows that it says something of."""

    def __init__(self, store: Any) -> None:
        self.store, self.config, self.address = store, store.config, store.address
        self.searched, self.scored, self.used = 0, 0, set[int]()

    def search(self, queries: Any, k: int, where: Any = None, recall: float | None = None) -> Any:
        self.searched += len(queries)
        return self._noted(self.store.search(queries, k, where, recall))

    def score(self, queries: Any, ids: Any, where: Any = None) -> Any:
        self.scored += len(queries)
        return self._noted(self.store.score(queries, ids, where))

    def _noted(self, found: Any) -> Any:
        self.used |= set(found.ids[found.mask].tolist())
        return found


def filled(address: str = "ram:", metric: str = "ip") -> tuple[Any, Any]:
    """A store of six documents of 40 rows each, with few different values."""
    rng = np.random.default_rng(0)
    store = open_store(address, StoreConfig(dim=WIDTH, metric=metric, keys="float32"))
    references = References(SOURCES, np.arange(ROWS) // 40, np.arange(ROWS) % 40)
    store.add(rng.standard_normal((ROWS, WIDTH)).astype(np.float32), rng.integers(0, TOKENS, ROWS), references)
    store.commit()
    return store, store.get(range(ROWS))


def text(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, which tokens are asked about, and targets."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(rows, length, WIDTH, generator=draw, dtype=torch.float64)
    asked = torch.rand(rows, length, generator=draw) < 0.9
    return keys, asked, torch.randint(0, TOKENS, (rows, length), generator=draw)


def naive(rows: Any, usable: set[int], config: mnemic.OutputMemory, keys: Tensor, asked: Tensor, read: Tensor) -> Any:
    """(score, value) of the rows of each token asked about, best first, and the number of searches: one by one."""
    results, searches = [], 0
    for line, wanted, tokens in zip(keys.float().double().numpy(), asked.tolist(), read.tolist(), strict=True):
        since, last = 0, list[int]()
        for t, query in enumerate(line):
            if not wanted[t]:
                since = 0
                continue
            apart = rows.keys.astype(np.float64) - query
            near = -(apart**2).sum(1)
            if config.similarity == "dot":
                near = rows.keys.astype(np.float64) @ query / WIDTH**0.5
            ahead = []
            if since % (config.follow + 1):
                ahead = [row + 1 for row in last if rows.values[row] == tokens[t - 1] and row + 1 in usable]
            if len(ahead) < min(searching.FEWEST, config.k):
                ahead, searches = sorted(usable, key=lambda row: -near[row])[: config.k], searches + 1
            last = sorted(ahead, key=lambda row: -near[row])
            results.append([(near[row], int(rows.values[row])) for row in last])
            since += 1
    return results, searches


def assert_same(found: Any, wanted: Any) -> None:
    scores, values, mask = found
    assert len(mask) == len(wanted)
    for row, pairs in enumerate(wanted):
        assert mask[row].tolist() == [True] * len(pairs) + [False] * (mask.shape[1] - len(pairs))
        np.testing.assert_allclose(scores[row][mask[row]], [score for score, _ in pairs], rtol=1e-5, atol=1e-5)
        assert values[row][mask[row]].tolist() == [value for _, value in pairs]


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize(("similarity", "metric"), [("dot", "ip"), ("distance", "l2")])
@pytest.mark.parametrize("follow", [1, 3, 100])
def test_rows_are_those_of_a_walk_token_by_token(
    kind: str, similarity: str, metric: str, follow: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(searching, "FEWEST", 6)
    store, rows = filled("ram:" if kind == "ram" else str(tmp_path / "rows.store"), metric)
    watched, given = Watched(store), text(3, 40)
    config = mnemic.OutputMemory(external=store, k=K, similarity=similarity, follow=follow)
    wanted, searches = naive(rows, set(range(ROWS)), config, *given)
    assert_same(followed(watched, config, *given), wanted)
    assert watched.searched == searches
    assert len(wanted) / (follow + 1) <= searches < len(wanted)
    assert watched.scored >= len(wanted) - searches
    store.close()


def test_without_following_all_tokens_are_searched_at_once() -> None:
    store, _ = filled()
    watched, (keys, asked, targets) = Watched(store), text(3, 40)
    config = mnemic.OutputMemory(external=store, k=K, similarity="dot")
    assert config.follow == 0
    for one, other in zip(
        followed(watched, config, keys, asked, targets), nearest(store, config, keys[asked]), strict=True
    ):
        assert torch.equal(one, other)
    assert (watched.searched, watched.scored) == (int(asked.sum()), 0)


@pytest.mark.parametrize("follow", [0, 2])
def test_no_token_asked_about(follow: int) -> None:
    store, _ = filled()
    keys, asked, targets = text(2, 5)
    config = mnemic.OutputMemory(external=store, k=K, similarity="dot", follow=follow)
    assert [part.shape for part in followed(store, config, keys, asked & False, targets)] == [(0, K)] * 3


def test_a_token_with_few_rows_to_follow_is_searched_for() -> None:
    store, _ = filled()
    keys, _, targets = text(1, 2)
    asked = torch.ones(1, 2, dtype=torch.bool)
    for k, value, follows in ((ROWS, 0, True), (ROWS, TOKENS, False), (searching.FEWEST, 0, False)):
        watched = Watched(store)
        config = mnemic.OutputMemory(external=store, k=k, similarity="dot", follow=1)
        followed(watched, config, keys, asked, torch.full_like(targets, value))
        assert (watched.searched, watched.scored) == ((1, 1) if follows else (2, 0))


def test_deleted_rows_are_never_used(monkeypatch: Any) -> None:
    monkeypatch.setattr(searching, "FEWEST", 6)
    store, rows = filled()
    store.delete(Where.document("document 3", "blue"))
    store.commit()
    left = set(range(ROWS)) - set(range(120, 160))
    watched, given = Watched(store), text(3, 40)
    config = mnemic.OutputMemory(external=store, k=K, similarity="dot", follow=3)
    wanted, searches = naive(rows, left, config, *given)
    assert_same(followed(watched, config, *given), wanted)
    assert watched.searched == searches < len(wanted)
    assert watched.used <= left
    assert 119 in watched.used, "its next row is a deleted one"


def test_a_token_whose_rows_lead_to_deleted_ones_is_searched_for() -> None:
    rng, keys = np.random.default_rng(2), torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(2))
    store = open_store("ram:", StoreConfig(dim=WIDTH, metric="ip", keys="float32"))
    references = References([Source("kept"), Source("gone")], np.arange(ROWS) % 2, np.arange(ROWS))
    store.add(rng.standard_normal((ROWS, WIDTH)).astype(np.float32), np.zeros(ROWS, np.int64), references)
    store.commit()
    store.delete(Where.document("gone"))
    store.commit()
    watched, asked = Watched(store), torch.ones(1, 8, dtype=torch.bool)
    config = mnemic.OutputMemory(external=store, k=K, similarity="dot", follow=1)
    found = followed(watched, config, keys, asked, torch.zeros(1, 8, dtype=torch.long))
    assert (watched.searched, watched.scored) == (8, 4)
    for one, other in zip(found, nearest(store, config, keys[asked]), strict=True):
        assert torch.equal(one, other)


def test_other_namespaces_are_never_used(monkeypatch: Any) -> None:
    monkeypatch.setattr(searching, "FEWEST", 6)
    store, rows = filled()
    red = {row for row in range(ROWS) if row // 40 % 2 == 0}
    watched, given = Watched(store), text(3, 40)
    config = mnemic.OutputMemory(external=store, k=K, similarity="dot", follow=3, namespaces=["red"])
    wanted, searches = naive(rows, red, config, *given)
    assert_same(followed(watched, config, *given), wanted)
    assert watched.searched == searches < len(wanted)
    assert watched.used <= red


TEXT = "the cat sat on the mat and the rat sat on the hat, the bat sat on the cat"
OTHERS = ("the mat sat on the cat and the hat", "a rat sat", "on the mat the cat and on the bat the hat sat")


@pytest.fixture
def reader(byte_model: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """A model, its tokenizer, and a store of what it has read."""
    monkeypatch.setattr(searching, "FEWEST", 4)
    model, tokenizer = byte_model
    settings = {"split": "valid", "window": 16, "metric": "ip"}
    with mnemic.build_store(model, tokenizer, corpus(TEXT), tmp_path / "rows.store", **settings) as store:
        yield model, tokenizer, store


def test_evaluation_follows_whatever_shares_a_batch(reader: Any) -> None:
    model, tokenizer, store = reader
    found: dict[int, list[float]] = {0: [], 2: []}
    searches: dict[int, set[int]] = {0: set(), 2: set()}
    counts, search = list[int](), store.search
    store.search = lambda queries, *others: counts.append(len(queries)) or search(queries, *others)
    for follow, overlap, size in ((0, False, 1), (0, False, 3), (2, False, 1), (2, True, 2), (2, False, 7)):
        options = {"k": 20, "weight": 0.3, "follow": follow, "overlap": overlap}
        mnemic.augment(model, mnemic.OutputMemory(external=store, **options))
        counts.clear()
        scored = mnemic.evaluate(model, tokenizer, corpus(*OTHERS), window=12, stride=7, batch_size=size)
        found[follow].append(scored["nll"])
        searches[follow].add(sum(counts))
        model.memory.detach()
    assert found[0] == pytest.approx([found[0][0]] * 2, rel=1e-9)
    assert found[2] == pytest.approx([found[2][0]] * 3, rel=1e-9)
    assert found[0][0] != pytest.approx(found[2][0], rel=1e-4)
    assert len(searches[0]) == len(searches[2]) == 1
    assert min(searches[2]) < 0.7 * min(searches[0])


def test_generation_always_searches(reader: Any) -> None:
    model, _, store = reader
    ids = torch.tensor([list(b"the cat sat")])
    texts = []
    for follow in (0, 3):
        mnemic.augment(model, mnemic.OutputMemory(external=store, k=20, weight=0.3, follow=follow))
        store.score = None
        texts.append(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0))
        model.memory.detach()
    assert torch.equal(*texts)


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="follow = -1: expected 0 or more"):
        mnemic.OutputMemory(follow=-1)


@pytest.mark.parametrize("follow", [1, 3])
def test_a_token_that_is_yet_to_be_predicted_changes_nothing(monkeypatch: Any, follow: int) -> None:
    monkeypatch.setattr(searching, "FEWEST", 3)
    store, _ = filled()
    config = mnemic.OutputMemory(external=store, k=K, follow=follow)
    keys, _, targets = text(2, 12)
    asked = torch.ones_like(targets, dtype=torch.bool)

    def found(targets: Tensor) -> list[Tensor]:
        rows = followed(store, config.changed(similarity="dot"), keys, asked, targets)
        return [part.view(2, 12, -1) for part in rows]

    before = found(targets)
    changed = False
    for t in range(12):
        others = targets.clone()
        others[:, t] = (others[:, t] + 1) % TOKENS
        after = found(others)
        assert all(torch.equal(old[:, : t + 1], new[:, : t + 1]) for old, new in zip(before, after, strict=True))
        changed |= not torch.equal(before[0][:, t + 1 :], after[0][:, t + 1 :])
    assert changed  # it does lead to other rows for the tokens after it


def test_a_store_of_codes_is_refused_when_it_is_put_in(tmp_path: Path) -> None:
    model = augmented(follow=2)
    codes = StoreConfig(dim=32, metric="ip", keys="codes", index="IVF1,PQ4x4fs")
    with open_store(tmp_path / "codes", codes) as store:
        with pytest.raises(UsageError, match=r"keeps codes in place of keys.*set follow = 0"):
            model.memory.output.connect(store)
        augmented().memory.output.connect(store)
