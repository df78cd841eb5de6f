from __future__ import annotations

import json
import math
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mnemic.data import (
    Document,
    DocumentStreams,
    SimilarSegments,
    TokenizedCorpus,
    open_corpus,
    similar,
    tokenize_corpus,
    train_tokenizer,
)
from mnemic.data.shuffle import shuffled
from mnemic.data.similar import Segments, chain, find_similar
from mnemic.errors import UsageError

from .test_streams import LENGTHS, NAMES, ROWS, SEEDS, SEGMENTS, Batch, equal

# Algorithm 1


def algorithm_1(neighbours: list[list[int]], starts: list[int], batch_size: int) -> list[list[int]]:
    """The paper's pseudo-code; its random sample of what is left is the first of `starts` that is left."""
    left = set(range(len(neighbours)))
    order: list[int] = []
    current = None
    while len(left) != 0:
        if current is None:
            current = next(start for start in starts if start in left)
        order.append(current)
        left.remove(current)
        following = None
        for candidate in neighbours[current]:
            if candidate in left:
                following = candidate
                break
        current = following
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


@given(st.data(), st.integers(1, 30), st.integers(1, 5))
def test_the_chain_is_that_of_the_paper(data, count, k):
    lists = st.lists(st.integers(0, count - 1), max_size=k)
    neighbours = data.draw(st.lists(lists, min_size=count, max_size=count))
    starts = data.draw(st.permutations(range(count)))
    filled = np.array([[*row, *[-1] * (k - len(row))] for row in neighbours])
    assert chain(filled, starts).tolist() == algorithm_1(neighbours, starts, count)[0]


@given(LENGTHS, ROWS, SEGMENTS, SEEDS, st.integers(1, 4), st.booleans())
def test_batches_are_those_of_the_paper_in_another_order(toy, lengths, rows, length, seed, k, random):
    corpus = toy(lengths)
    segments = list(Segments(corpus, length))
    assert [token for segment in segments for token in segment] == corpus.tokens.tolist()
    found = [[other for other in row if other >= 0] for row in find_similar(segments, corpus.vocab_size, k).tolist()]
    neighbours = [[] for _ in segments] if random else found
    batches = list(SimilarSegments(corpus, rows, length, seed, k, shuffled=random, epochs=2))
    each = len(batches) // 2
    for epoch in range(2):
        starts = [shuffled(place, len(segments), seed, 2 * epoch) for place in range(len(segments))]
        expected = [[segments[number] for number in batch] for batch in algorithm_1(neighbours, starts, rows)]
        assert sorted(expected) == sorted(map(texts, batches[epoch * each : (epoch + 1) * each]))


def texts(batch: Batch) -> list[list[int]]:
    """The tokens of each row that is not padding."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return [tokens[real].tolist() for tokens, real in rows if real.any()]


# BM25


def bm25(query: list[int], segment: list[int], segments: list[list[int]], k1: float = 1.5, b: float = 0.75) -> float:
    """Robertson's formula, term by term."""
    average = sum(map(len, segments)) / len(segments)
    total = 0.0
    for term in query:
        having = sum(term in other for other in segments)
        weight = math.log(max(1.0, (len(segments) - having + 0.5) / (having + 0.5)))
        times = segment.count(term)
        total += weight * times / (k1 * (1 - b + b * len(segment) / average) + times)
    return total


@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=8), min_size=1, max_size=14), st.integers(1, 6))
def test_similar_segments_are_the_best_by_bm25(segments, k):
    found = find_similar(segments, 13, k).tolist()
    for number, row in enumerate(found):
        scores = {i: bm25(segments[number], other, segments) for i, other in enumerate(segments) if i != number}
        best = sorted((score for score in scores.values() if score > 0), reverse=True)[:k]
        named = [other for other in row if other >= 0]
        assert row == named + [-1] * (k - len(best))
        assert len(set(named)) == len(named)
        assert [scores[other] for other in named] == pytest.approx(best, rel=1e-5)


def test_of_equally_similar_segments_the_first_come_first():
    segments = [[1, 2], [3, 4], [1, 5], [3, 4], [3, 4], [3, 4]] * 20
    best, good = range(0, 120, 6), range(2, 120, 6)
    assert find_similar(segments, 6, 30)[12].tolist() == [*(number for number in best if number != 12), *good[:11]]


# Batches


@given(LENGTHS, ROWS, SEGMENTS, SEEDS, st.booleans())
def test_each_token_is_read_once_an_epoch_with_its_target(toy, lengths, rows, length, seed, random):
    """The rows are those of one stream through all documents, each of them starting afresh, and padding."""
    corpus = toy(lengths)
    stream = list(DocumentStreams(corpus, 1, length, shuffle=False, epochs=1))
    for batch in stream:
        batch["document_starts"][0, 0] = True
    batches = list(SimilarSegments(corpus, rows, length, seed, shuffled=random, epochs=1))
    padding = len(batches) * rows - len(stream)
    assert 0 <= padding < rows
    nothing = tuple((value,) * length for value in (corpus.end_token, -100, False, 0))
    assert Counter(contents(batches)) == Counter(contents(stream)) + Counter({nothing: padding})
    assert sum(int((batch["targets"] != -100).sum()) for batch in batches) == corpus.target_count
    assert [tensor.dtype for tensor in batches[0].values()] == [torch.int64, torch.int64, torch.bool, torch.int64]


def contents(batches: list[Batch]) -> list[Any]:
    rows = range(len(batches[0]["input_ids"]))
    return [tuple(tuple(batch[name][row].tolist()) for name in NAMES) for batch in batches for row in rows]


@given(LENGTHS, ROWS, SEGMENTS, SEEDS, st.integers(0, 8), st.sampled_from([None, 2]))
def test_resuming_gives_the_same_batches(toy, lengths, rows, length, seed, steps, epochs):
    corpus = toy(lengths)
    stream = SimilarSegments(corpus, rows, length, seed, epochs=epochs)
    for _ in islice(stream, steps):
        pass
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = SimilarSegments(corpus, rows, length, seed, epochs=epochs)
    resumed.load_state_dict(state)
    assert equal(list(islice(resumed, 6)), list(islice(stream, 6)))


@given(LENGTHS, st.integers(1, 3), st.integers(1, 3), SEGMENTS, st.sampled_from([None, 1, 2]))
def test_ranks_share_the_rows_of_one_large_batch(toy, lengths, rows, world, length, epochs):
    corpus = toy(lengths)
    whole = list(islice(SimilarSegments(corpus, rows * world, length, epochs=epochs), 12))
    ranks = [SimilarSegments(corpus, rows, length, epochs=epochs, rank=rank, world_size=world) for rank in range(world)]
    parts = [list(islice(stream, 12)) for stream in ranks]
    assert {len(part) for part in parts} == {len(whole)}
    joined = [{name: torch.cat([part[name] for part in step]) for name in NAMES} for step in zip(*parts, strict=True)]
    assert equal(joined, whole)
    assert all(stream.state_dict() == ranks[0].state_dict() for stream in ranks)


def test_seeds_and_epochs_have_other_batches_in_another_order(toy):
    corpus = toy([200] * 5)

    def order(seed: int) -> list[list[list[int]]]:
        return [texts(batch) for batch in SimilarSegments(corpus, 4, 10, seed, epochs=2)]

    assert order(1) == order(1) != order(2)
    first, second = order(1)[:26], order(1)[26:]
    assert {tuple(map(tuple, batch)) for batch in first} != {tuple(map(tuple, batch)) for batch in second}


def test_without_epochs_it_goes_on(toy):
    corpus = toy([20, 30])
    twice = list(SimilarSegments(corpus, 2, 7, epochs=2))
    assert equal(list(islice(SimilarSegments(corpus, 2, 7), len(twice))), twice)
    assert len(list(islice(SimilarSegments(corpus, 2, 7), 50))) == 50


CHANGES: list[dict[str, Any]] = [{"seed": 1}, {"segment_length": 7}, {"k": 3}, {"shuffled": True}, {"epochs": 1}]


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_of_other_settings_is_refused(toy, change):
    usual: dict[str, Any] = {"batch_size": 2, "segment_length": 5, "seed": 0}
    state = SimilarSegments(toy([4, 5]), **usual).state_dict()
    with pytest.raises(UsageError, match=f"saved with {next(iter(change))} = "):
        SimilarSegments(toy([4, 5]), **usual | change).load_state_dict(state)
    with pytest.raises(UsageError, match="saved with corpus = "):
        SimilarSegments(toy([4, 6]), **usual).load_state_dict(state)
    with pytest.raises(UsageError, match="saved with row_count = 2"):
        SimilarSegments(toy([4, 5]), **usual, world_size=2).load_state_dict(state)


WRONG = [
    *({name: 0} for name in ("batch_size", "segment_length", "k", "epochs", "world_size")),
    {"rank": 1},
    {"rank": -1},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_settings_are_refused(toy, wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} = {next(iter(wrong.values()))}: expected"):
        SimilarSegments(toy([1]), **{"batch_size": 1, "segment_length": 1} | wrong)


# What is kept


@pytest.fixture
def no_search(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("it searches")

    return lambda: monkeypatch.setattr(similar, "find_similar", refuse)


def test_the_search_is_done_once(toy, tmp_path, no_search):
    corpus = toy([50, 60, 70])
    first = list(SimilarSegments(corpus, 3, 8, folder=tmp_path / "similar", epochs=1))
    assert equal(first, list(SimilarSegments(corpus, 3, 8, epochs=1)))
    no_search()
    assert equal(first, list(SimilarSegments(corpus, 3, 8, folder=tmp_path / "similar", epochs=1)))
    for other in ({"segment_length": 9}, {"k": 3}):
        with pytest.raises(AssertionError, match="it searches"):
            SimilarSegments(corpus, **{"batch_size": 3, "segment_length": 8, "folder": tmp_path / "similar"} | other)


def test_a_random_order_needs_no_search(toy, no_search):
    no_search()
    assert len(list(SimilarSegments(toy([50, 60, 70]), 3, 8, shuffled=True, epochs=1))) == 8


def test_what_was_kept_of_another_corpus_is_not_used(toy, tmp_path, caplog):
    SimilarSegments(toy([50, 60, 70]), 3, 8, folder=tmp_path)
    corpus = toy([50, 60, 71])
    kept = list(SimilarSegments(corpus, 3, 8, folder=tmp_path, epochs=1))
    assert "of another corpus: the similar segments are searched for again" in caplog.text
    assert equal(kept, list(SimilarSegments(corpus, 3, 8, epochs=1)))


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_made_anew(toy, tmp_path, monkeypatch, data):
    searches = []
    monkeypatch.setattr(similar, "find_similar", lambda *given: searches.append(given) or find_similar(*given))
    corpus = toy([50, 60, 70])
    expected = list(SimilarSegments(corpus, 3, 8, folder=tmp_path, epochs=1))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    altered = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
    path.write_bytes(data.draw(st.sampled_from([whole[:place], altered])))
    searches.clear()
    for _ in range(2):
        assert equal(list(SimilarSegments(corpus, 3, 8, folder=tmp_path, epochs=1)), expected)
        assert len(searches) == 1


# Similarity, measured


def neighbouring(batches: list[Batch]) -> list[tuple[list[int], list[int]]]:
    """The pairs of rows that come one after the other in a batch."""
    return [pair for batch in batches for pair in pairwise(texts(batch))]


@pytest.fixture(scope="module")
def topics() -> tuple[TokenizedCorpus, dict[int, int]]:
    """A corpus of 12 topics, 5 documents each, half of the words common to all; and the topic of each word."""
    random = np.random.default_rng(0)
    documents = []
    for number in random.permutation(60).tolist():
        words = [f"common{random.integers(30)}", f"topic{number % 12}-{random.integers(40)}"]
        for _ in range(149):
            words += [f"common{random.integers(30)}", f"topic{number % 12}-{random.integers(40)}"]
        documents.append(Document(f"document {number}", " ".join(words)))
    tokenizer = train_tokenizer(documents, kind="word")
    names = {token: word.split("-")[0] for word, token in tokenizer.get_vocab().items() if word.startswith("topic")}
    return tokenize_corpus(documents, tokenizer), {token: int(name[5:]) for token, name in names.items()}


def test_neighbours_share_a_topic(topics):
    """Public code once compared numbers with strings and packed random batches: 6.5 % in place of 90 %."""
    corpus, topic_of = topics

    def topic(row: list[int]) -> int:
        return Counter(topic_of[token] for token in row if token in topic_of).most_common(1)[0][0]

    def share(batches: SimilarSegments) -> float:
        pairs = neighbouring(list(batches))
        return sum(topic(one) == topic(other) for one, other in pairs) / len(pairs)

    assert share(SimilarSegments(corpus, 8, 30, epochs=1)) > 0.9
    assert share(SimilarSegments(corpus, 8, 30, epochs=1, shuffled=True)) < 0.15
    batches = list(SimilarSegments(corpus, 8, 30, epochs=1))
    following = [(texts(one)[-1], texts(other)[0]) for one, other in pairwise(batches)]
    assert sum(topic(one) == topic(other) for one, other in following) / len(following) < 0.25  # batches are shuffled


def test_neighbours_in_wikitext_2_share_rare_words(shared_data, monkeypatch):
    monkeypatch.setenv("MNEMIC_DATA", str(shared_data))
    text = open_corpus("wikitext-2")
    corpus = tokenize_corpus(text.documents("valid"), train_tokenizer(text.documents("valid"), kind="word"))
    segments = [set(segment) for segment in Segments(corpus, 64)]
    having = Counter(token for segment in segments for token in segment)
    rare = {token for token, count in having.items() if count <= len(segments) / 100}

    def shared_words(batches: SimilarSegments) -> float:
        pairs = neighbouring(list(batches))
        return sum(len(rare & set(one) & set(other)) for one, other in pairs) / len(pairs)

    packed = shared_words(SimilarSegments(corpus, 8, 64, epochs=1))
    random = shared_words(SimilarSegments(corpus, 8, 64, epochs=1, shuffled=True))
    assert packed > 10 * random > 0
