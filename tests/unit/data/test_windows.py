from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mnemic.data import SlidingWindows, TokenizedCorpus
from mnemic.errors import UsageError


@st.composite
def settings_of(draw: Any) -> tuple[list[int], int, int]:
    window = draw(st.integers(1, 9))
    return draw(st.lists(st.integers(0, 20), min_size=1, max_size=6)), window, draw(st.integers(1, window))


def rows(corpus: TokenizedCorpus, window: int, stride: int, batch_size: int) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each window without its padding, which must be on the right."""
    found = []
    for batch in SlidingWindows(corpus, window, stride, batch_size):
        assert batch["input_ids"].shape[0] <= batch_size
        assert batch["input_ids"].shape[1] <= window
        assert batch["document_starts"][:, 0].all()
        assert not batch["document_starts"][:, 1:].any()
        lengths = batch["attention_mask"].sum(1).tolist()
        for row, length in enumerate(lengths):
            assert batch["attention_mask"][row, :length].all()
            assert (batch["targets"][row, length:] == -100).all()
            found.append((batch["input_ids"][row, :length].tolist(), batch["targets"][row, :length].tolist()))
    return found


def naive(corpus: TokenizedCorpus, window: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """The oracle: token after token, each scored in the first window that reaches it."""
    found = []
    for ids in map(list, corpus):
        ends = [min(window, len(ids) - 1)]
        while ends[-1] < len(ids) - 1:
            ends.append(min(ends[-1] + stride, len(ids) - 1))
        scored: set[int] = set()
        for end in ends:
            places = range(max(0, end - window), end)
            found.append(([ids[p] for p in places], [-100 if p in scored else ids[p + 1] for p in places]))
            scored |= set(places)
    return found


@given(settings_of(), st.integers(1, 5))
def test_windows_are_those_of_the_naive_version_whatever_the_batch_size(toy, settings, batch_size):
    lengths, window, stride = settings
    corpus = toy(lengths)
    assert rows(corpus, window, stride, batch_size) == naive(corpus, window, stride)


@given(settings_of(), st.integers(1, 5))
def test_every_target_of_every_document_is_scored_exactly_once(toy, settings, batch_size):
    lengths, window, stride = settings
    corpus = toy(lengths)
    scored = Counter()
    for inputs, targets in rows(corpus, window, stride, batch_size):
        for token, target in zip(inputs, targets, strict=True):
            if target != -100:
                scored[token, target] += 1
    assert scored == Counter((a, b) for ids in map(list, corpus) for a, b in pairwise(ids))
    assert scored.total() == corpus.target_count


@given(settings_of())
def test_after_the_first_window_each_score_has_its_context(toy, settings):
    lengths, window, stride = settings
    for inputs, targets in rows(toy(lengths), window, stride, 1):
        context = next(i for i, target in enumerate(targets) if target != -100)
        assert context == 0 or (len(inputs) == window and context >= window - stride)


def test_the_number_of_batches_is_known(toy):
    windows = SlidingWindows(toy([0, 7, 30]), 8, 3, 2)
    assert len(windows) == sum(1 for _ in windows) == sum(1 for _ in windows)


@pytest.mark.parametrize(("window", "stride", "batch_size"), [(0, 1, 1), (4, 0, 1), (4, 5, 1), (4, 4, 0)])
def test_bad_settings_are_refused(toy, window, stride, batch_size):
    with pytest.raises(UsageError, match="expected"):
        SlidingWindows(toy([1]), window, stride, batch_size)
