"""The working memory against a deque for each row, and the two ways to search against comparing everything."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mnemic.memories.attention import search as searching
from mnemic.memories.attention.lists import Lists
from mnemic.memories.attention.search import MISSING, ExactKeys, ListedKeys, nearest, new_ring
from mnemic.memories.attention.working import Row, WorkingMemory

HEADS, WIDTH = 2, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_row(size: int, spare: int, lists: bool = False, dtype: torch.dtype = torch.float32) -> Row:
    values = torch.empty(HEADS, size + spare, WIDTH, dtype=dtype)
    if lists:
        return Row(size, values, ListedKeys(size, 8, 1.0, HEADS, WIDTH, dtype))
    return Row(size, values, ExactKeys(HEADS, WIDTH, size + spare, dtype, "cpu"))


def expected(pairs: list[tuple[int, Tensor, Tensor]], queries: Tensor, k: int) -> list[list[list[int]]]:
    """By head and query the numbers of the k pairs with the highest scores, from the highest on."""
    found = []
    for head, rows in enumerate(queries):
        found.append([[n for _, n in sorted(((-float(q @ key[head]), n) for n, key, _ in pairs))[:k]] for q in rows])
    return found


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 14), st.integers(0, 7)),
        st.tuples(st.just("clear"), st.integers(1, 7), st.just(0)),
        st.tuples(st.just("find"), st.integers(1, 12), st.integers(0, 4)),
        st.tuples(st.just("reload"), st.just(0), st.just(0)),
        st.tuples(st.just("swap"), st.just(0), st.just(0)),
    ),
    max_size=20,
)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 12), spare=st.integers(4, 6), steps=steps, seed=st.integers(0, 99))
def test_a_deque_finds_the_same(size: int, spare: int, steps: list[Any], seed: int) -> None:
    check_against_deques(size, spare, steps, seed, lists=False)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(10, 30), spare=st.integers(4, 9), steps=steps, seed=st.integers(0, 99))
def test_a_deque_finds_the_same_as_lists(size: int, spare: int, steps: list[Any], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "FEWEST", 8)
        patch.setattr(searching, "PENDING", 4)
        patch.setattr(searching, "STALE", 3)
        look_everywhere(patch)
        check_against_deques(size, spare, steps, seed, lists=True)


def look_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Lists around a few of the keys, all of which a search looks into."""
    fill = Lists.fill

    def fill_all(self: Lists, keys: Any, first: int) -> None:
        self.probes = self.points.ntotal
        fill(self, keys, first)

    def learn(self: Lists, keys: Tensor, first: int, *_: Any) -> None:
        points = keys[:: max(len(keys) // 16, 1)].float()
        self.load(torch.nn.functional.normalize(points, dim=-1), len(points))
        self.fill(keys.float().numpy(), first)

    patch.setattr(Lists, "fill", fill_all)
    patch.setattr(Lists, "learn", learn)


def check_against_deques(size: int, spare: int, steps: list[Any], seed: int, lists: bool) -> None:
    """Three rows and a deque for each go through the same; what one finds, the other does."""
    rows = 3
    memory = WorkingMemory([make_row(size, spare, lists) for _ in range(rows)])
    oracle: list[deque[tuple[int, Tensor, Tensor]]] = [deque() for _ in range(rows)]
    counts = [0] * rows
    for step, (what, number, extra) in enumerate(steps):
        if what == "append":  # a random part of the rows and places
            keys, values = (random(rows, HEADS, number, WIDTH, seed=seed + 100 * step + n) for n in (0, 1))
            kept = random(rows, number, seed=seed + extra) > -0.5
            memory.append(keys, values, kept)
            for row in range(rows):
                for place in kept[row].nonzero().flatten().tolist():
                    oracle[row].append((counts[row], keys[row, :, place], values[row, :, place]))
                    counts[row] += 1
        elif what == "clear":
            cleared = torch.tensor([bool(number >> row & 1) for row in range(rows)])
            memory.clear(cleared)
            for row in cleared.nonzero().flatten().tolist():
                oracle[row].clear()
                counts[row] = 0
        elif what == "reload":
            tensors = memory.tensors()
            memory = WorkingMemory([make_row(size, spare, lists) for _ in range(rows)])
            memory.load_tensors(tensors)
        elif what == "swap":
            memory.select([1, 1, 0])
            oracle, counts = [deque(oracle[1]), deque(oracle[1]), oracle[0]], [counts[1], counts[1], counts[0]]
        else:
            held = [min(extra, spare), 0, spare]
            queries = random(rows, HEADS, 4, WIDTH, seed=seed + step)
            found = memory.find(queries, number, held)
            for row in range(rows):
                seen = [p for p in oracle[row] if p[0] < counts[row] - held[row]][-size:]
                while seen and oracle[row][0][0] < seen[0][0]:  # what has gone does not come back
                    oracle[row].popleft()
                by_number = {n: (key, value) for n, key, value in seen}
                for head, per_query in enumerate(expected(seen, queries[row], number)):
                    for t, wanted in enumerate(per_query):
                        got = found[row].numbers[head, t]
                        assert got[got != MISSING].tolist() == wanted
                        assert found[row].keys[head, t].isfinite().all()
                        for place, n in enumerate(wanted):
                            assert torch.equal(found[row].keys[head, t, place], by_number[n][0][head])
                            assert torch.equal(found[row].values[head, t, place], by_number[n][1][head])


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 900), min_size=1, max_size=3), k=st.integers(1, 70), queries=st.integers(1, 40))
def test_exact_search_in_groups_finds_the_highest_scores(counts: list[int], k: int, queries: int) -> None:
    parts = [random(count, WIDTH, seed=n) for n, count in enumerate(counts)]
    asked = random(queries, WIDTH, seed=9)
    found = nearest(asked, parts, k)
    scores = asked @ torch.cat(parts).T
    k = min(k, sum(counts))
    assert found.shape == (queries, k)
    torch.testing.assert_close(scores.gather(1, found), scores.topk(k, 1).values)


@pytest.mark.parametrize("search", ["exact", "lists"])
def test_narrow_queries_are_compared_with_wide_numbers(search: str) -> None:
    queries, keys = random(HEADS, 20, WIDTH, seed=1).bfloat16(), random(HEADS, 300, WIDTH)
    held = ExactKeys(HEADS, WIDTH, 300, torch.float32, "cpu")
    if search == "lists":  # keys that wait
        held = ListedKeys(300, 8, 0.9, HEADS, WIDTH, torch.float32)
    held.add(keys)
    numbers, found = held.search(queries, 8, 0, 300)
    wanted = (queries.float() @ keys.transpose(1, 2)).topk(8).indices
    assert torch.equal(numbers.sort(-1).values, wanted.sort(-1).values)
    assert found.dtype == torch.bfloat16


def test_exact_search_never_holds_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "SCORES", 1 << 14)
    tables, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, *a, **k: tables.append(shape) or empty(shape, *a, **k))
    parts, asked = [random(4000, WIDTH)], random(64, WIDTH, seed=1)
    torch.testing.assert_close(nearest(asked, parts, 5), (asked @ parts[0].T).topk(5).indices)
    assert max(rows * width for rows, width in tables) < 64 * 4000 / 4


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists for small memories."""
    monkeypatch.setattr(searching, "FEWEST", 64)
    monkeypatch.setattr(searching, "PENDING", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("few")
def test_lists_that_are_all_looked_into_find_what_a_deque_finds(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_everywhere(monkeypatch)
    size, spare, k = 200, 30, 8
    row = make_row(size, spare, lists=True, dtype=dtype)
    oracle: deque[tuple[int, Tensor, Tensor]] = deque()
    listed = 0
    for step in range(60):
        count = 1 + step * 7 % 23
        keys, values = (random(HEADS, count, WIDTH, seed=2 * step + n).to(dtype) for n in (0, 1))
        if step == 40:
            row.clear()
            oracle.clear()
        row.append(keys, values)
        for place in range(count):
            oracle.append((len(oracle), keys[:, place].float(), values[:, place].float()))
        held = 15
        queries = random(HEADS, 3, WIDTH, seed=step)
        found = row.find(queries, k, held)
        numbers, found_keys, found_values = found.numbers, found.keys, found.values
        listed += row.keys.any_listed  # type: ignore[attr-defined]
        seen = list(oracle)[: max(len(oracle) - held, 0)][-size:]
        by_number = {n: (key, value) for n, key, value in seen}
        for head, per_query in enumerate(expected(seen, queries, k)):
            for t, wanted in enumerate(per_query):
                got = numbers[head, t][numbers[head, t] != MISSING].tolist()
                assert set(got) <= set(by_number)  # neither what was forgotten nor what the context holds
                assert sorted(got) == sorted(wanted)
                for place, n in enumerate(numbers[head, t].tolist()):
                    assert found_keys[head, t, place].isfinite().all()
                    if n != MISSING:
                        assert torch.equal(found_keys[head, t, place], by_number[n][0][head])
                        assert torch.equal(found_values[head, t, place], by_number[n][1][head])
    assert listed > 40
    first = max(row.count - row.values.shape[1], row.keys.first)  # type: ignore[attr-defined]
    kept = [key for n, key, _ in oracle if n >= first]
    torch.testing.assert_close(row.keys.all(first).float(), torch.stack(kept, 1))


@pytest.mark.usefixtures("few")
def test_lists_reach_the_recall_that_is_asked_and_points_are_kept_between_documents() -> None:
    keys = ListedKeys(2000, 8, 0.9, HEADS, WIDTH, torch.float32)
    for step in range(30):
        keys.add(torch.nn.functional.normalize(random(HEADS, 100, WIDTH, seed=step), dim=-1))
        keys.forget(max(keys.end - 2000, 0))
        keys.search(random(HEADS, 64, WIDTH, seed=step + 50), 8, max(keys.end - 2000, 0), keys.end)
    assert keys.any_listed
    assert keys.recall(8) >= 0.85  # type: ignore[operator]
    assert max(lists.probes for lists in keys.heads) < keys.heads[0].points.ntotal
    before = keys.heads[0].learned()
    keys.clear()
    keys.add(random(HEADS, 100, WIDTH, seed=99))
    keys.search(random(HEADS, 4, WIDTH), 8, 0, 100)
    assert torch.equal(keys.heads[0].learned(), before)
    assert keys.heads[0].index.ntotal == 100


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("wanted", [0.05, 0.5, 0.9])
def test_no_more_lists_are_looked_into_than_the_recall_that_is_asked_needs(wanted: float) -> None:
    lists, asked = Lists(WIDTH, torch.float32), torch.nn.functional.normalize(random(200, WIDTH, seed=1), dim=-1)
    lists.learn(torch.nn.functional.normalize(random(2000, WIDTH), dim=-1), 0, asked, 8, wanted)
    for _ in range(6):
        lists.adjust(asked, 8, wanted)
    needed = lists.probes
    assert lists.recall(asked, 8) >= wanted
    fewer = needed - max(needed // 8, 1)
    if fewer:
        lists.probes = fewer
        assert lists.recall(asked, 8) < wanted
    else:
        assert needed == 1


@pytest.mark.usefixtures("few")
def test_points_are_learned_anew_once_a_memory_has_been_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    learn, learned = Lists.learn, []
    monkeypatch.setattr(Lists, "learn", lambda self, *given: learned.append(self) or learn(self, *given))
    keys = ListedKeys(200, 4, 0.9, HEADS, WIDTH, torch.float32)
    generations = []
    for step in range(40):
        keys.add(random(HEADS, 20, WIDTH, seed=step))
        keys.forget(max(keys.end - 200, 0))
        keys.search(random(HEADS, 4, WIDTH), 4, max(keys.end - 200, 0), keys.end)
        generations.append(len(learned) // HEADS)
    assert generations[9] >= 1
    assert 2 <= generations[-1] - generations[9] <= 3  # 600 keys later


def test_a_copy_of_listed_keys_is_independent(few: None) -> None:
    keys = ListedKeys(400, 4, 1.0, HEADS, WIDTH, torch.float32)
    keys.add(random(HEADS, 100, WIDTH))
    keys.search(random(HEADS, 1, WIDTH), 4, 0, 100)
    twin = keys.copy()
    twin.add(random(HEADS, 50, WIDTH, seed=1))
    assert (keys.end, twin.end) == (100, 150)
    torch.testing.assert_close(twin.all(0)[:, :100], keys.all(0))


def test_keys_that_are_forgotten_leave_room_for_those_that_are_not(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are those nearest to the queries; one after the other they go, and others are found in their place."""
    look_everywhere(monkeypatch)
    topic = torch.nn.functional.normalize(random(HEADS, 1, WIDTH), dim=-1)
    every = random(HEADS, 600, WIDTH, seed=1)
    every[:, :150] = topic + 0.01 * every[:, :150]
    keys = ListedKeys(300, 8, 1.0, HEADS, WIDTH, torch.float32)
    queries = topic + 0.01 * random(HEADS, 4, WIDTH, seed=2)
    keys.add(every[:, :300])
    keys.search(queries, 8, 0, 300)
    for end in range(301, 451):
        keys.add(every[:, end - 1 : end])
        keys.forget(end - 300)
        numbers, _ = keys.search(queries, 8, end - 300, end)
        true = (queries @ every[:, end - 300 : end].transpose(1, 2)).topk(8).indices + end - 300
        assert torch.equal(numbers.sort(2).values, true.sort(2).values)
        assert keys.recall(8) == 1.0
    assert keys.any_listed


def test_a_new_document_is_searched_exactly_until_it_is_worth_lists(few: None) -> None:
    def unit(*shape: int, seed: int) -> Tensor:
        return torch.nn.functional.normalize(random(*shape, seed=seed), dim=-1)

    keys = ListedKeys(4000, 8, 0.9, HEADS, WIDTH, torch.float32)
    keys.add(unit(HEADS, 4000, WIDTH, seed=1))
    keys.search(unit(HEADS, 64, WIDTH, seed=2), 8, 0, 4000)
    before = keys.heads[0].learned()
    keys.clear()
    for count in range(20, 200, 20):
        keys.add(unit(HEADS, 20, WIDTH, seed=count))
        asked = unit(HEADS, 32, WIDTH, seed=count + 1)
        numbers, _ = keys.search(asked, 8, 0, count)
        true = (asked @ keys.all(0).transpose(1, 2)).topk(8).indices
        share = (numbers.unsqueeze(3) == true.unsqueeze(2)).any(2).float().mean()
        assert share == 1.0 if count < searching.FEWEST else share >= 0.8
    assert keys.any_listed
    assert torch.equal(keys.heads[0].learned(), before)


@pytest.mark.parametrize("lists", [False, True])
def test_what_is_read_where_there_is_no_pair_is_a_number(lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written may hold anything, and 0 times what is no number is none."""

    def anything(new: Tensor) -> Tensor:
        return new.fill_(torch.nan) if new.is_floating_point() else new

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: anything(empty(*a, **k)))
    row = Row(40, new_ring(HEADS, 50, WIDTH, torch.float32, "cpu"), make_row(40, 10, lists).keys)
    for count in (0, 3, 60):  # none, fewer than k, and more than there is room for
        row.append(*random(2, HEADS, count, WIDTH))
        found = row.find(random(HEADS, 5, WIDTH), 8, 0)
        assert found.keys.isfinite().all()
        assert found.values.isfinite().all()
