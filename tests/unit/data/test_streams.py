from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mnemic.data import DocumentStreams, TokenizedCorpus
from mnemic.data.shuffle import shuffled
from mnemic.errors import UsageError

Batch = dict[str, torch.Tensor]

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=9)
ROWS, SEGMENTS, SEEDS = st.integers(1, 5), st.integers(1, 9), st.integers(0, 3)


def spans(batches: list[Batch]) -> list[list[tuple[list[int], list[int]]]]:
    """The oracle: of each row, (inputs, targets) from one document start to the next."""
    rows = []
    for row in range(len(batches[0]["input_ids"])):
        columns = {name: torch.cat([batch[name][row] for batch in batches]).tolist() for name in batches[0]}
        found: list[tuple[list[int], list[int]]] = []
        dry = False
        for token, target, start, real in zip(*(columns[name] for name in NAMES), strict=True):
            assert not (dry and real), "a row goes on after padding"
            if not real:
                assert (target, start) == (-100, False)
                dry = True
                continue
            if start:
                found.append(([], []))
            found[-1][0].append(token)
            found[-1][1].append(target)
        rows.append(found)
    return rows


NAMES = ("input_ids", "targets", "document_starts", "attention_mask")


def documents(corpus: TokenizedCorpus) -> Counter:
    return Counter((tuple(ids), (*ids[1:], -100)) for ids in map(list, corpus))


@given(LENGTHS, ROWS, SEGMENTS, SEEDS, st.booleans(), st.integers(1, 3))
def test_a_pass_reads_each_document_whole_and_once(toy, lengths, rows, segment, seed, shuffle, epochs):
    corpus = toy(lengths)
    batches = list(DocumentStreams(corpus, rows, segment, seed, shuffle, epochs=epochs))
    read = [(tuple(inputs), tuple(targets)) for row in spans(batches) for inputs, targets in row]
    assert Counter(read) == Counter({document: count * epochs for document, count in documents(corpus).items()})
    scored = sum(int((batch["targets"] != -100).sum()) for batch in batches)
    assert scored == corpus.target_count * epochs
    assert all(batch["attention_mask"].any() for batch in batches)


@given(LENGTHS, SEGMENTS, SEEDS)
def test_an_endless_stream_repeats_no_document_within_an_epoch(toy, lengths, segment, seed):
    corpus = toy(lengths)
    stream = DocumentStreams(corpus, 1, segment, seed)
    batches = list(islice(stream, 3 * (len(corpus.tokens) // segment + 2)))
    read = [(tuple(inputs), tuple(targets)) for inputs, targets in spans(batches)[0]][:-1]
    for epoch in range(2):
        assert Counter(read[epoch * len(corpus) : (epoch + 1) * len(corpus)]) == documents(corpus)
    assert all(batch["attention_mask"].all() for batch in batches)


@given(LENGTHS, ROWS, SEGMENTS, SEEDS)
def test_few_documents_are_cut_so_that_every_token_is_still_read_once(toy, lengths, rows, segment, seed):
    corpus = toy(lengths)
    cuts = -(-rows // len(corpus))
    stretches = []
    for ids in map(list, corpus):
        bounds = [len(ids) * cut // cuts for cut in range(cuts + 1)]
        targets = [*ids[1:], -100]
        stretches += [(tuple(ids[a:b]), tuple(targets[a:b])) for a, b in pairwise(bounds) if a < b]
    longest = max(len(inputs) for inputs, _ in stretches)
    steps = 2 * (len(corpus.tokens) // segment + 1) + 2 * (longest // segment + 2)
    found = spans(list(islice(DocumentStreams(corpus, rows, segment, seed), steps)))
    complete = Counter((tuple(inputs), tuple(targets)) for row in found for inputs, targets in row[:-1])
    assert complete.keys() == set(stretches)
    assert all(complete[stretch] >= 2 * count for stretch, count in Counter(stretches).items())


def test_one_long_document_gives_every_row_its_own_part(toy):
    corpus = toy([4000])
    first = next(DocumentStreams(corpus, 4, 100))
    assert first["document_starts"][:, 0].all()
    text = corpus[0].tolist()
    places = {tuple(text[place : place + 100]): place for place in range(len(text))}
    assert sorted(places[tuple(row)] for row in first["input_ids"].tolist()) == [0, 1000, 2001, 3001]


def test_document_starts_in_mid_segment(toy):
    corpus = toy([2, 1])
    batch = next(DocumentStreams(corpus, 1, 8, shuffle=False, epochs=1))
    (a, b, c, d), (e, f, g) = corpus[0].tolist(), corpus[1].tolist()
    assert batch["input_ids"][0, :7].tolist() == [a, b, c, d, e, f, g]
    assert batch["targets"].tolist() == [[b, c, d, -100, f, g, -100, -100]]
    assert batch["document_starts"].nonzero()[:, 1].tolist() == [0, 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]
    assert [tensor.dtype for tensor in batch.values()] == [torch.int64, torch.int64, torch.bool, torch.int64]


@given(LENGTHS, ROWS, SEGMENTS, SEEDS, st.integers(0, 8), st.sampled_from([None, 2]))
def test_resuming_gives_the_same_batches(toy, lengths, rows, segment, seed, steps, epochs):
    corpus = toy(lengths)
    stream = DocumentStreams(corpus, rows, segment, seed, epochs=epochs)
    for _ in islice(stream, steps):
        pass
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = DocumentStreams(corpus, rows, segment, seed, epochs=epochs)
    resumed.load_state_dict(state)
    assert equal(list(islice(resumed, 6)), list(islice(stream, 6)))


@given(LENGTHS, st.integers(1, 3), st.integers(1, 3), SEGMENTS, st.sampled_from([None, 1, 2]))
def test_ranks_share_the_rows_of_one_large_batch(toy, lengths, rows, world, segment, epochs):
    corpus = toy(lengths)
    whole = list(islice(DocumentStreams(corpus, rows * world, segment, epochs=epochs), 12))
    settings = {"epochs": epochs, "world_size": world}
    ranks = [DocumentStreams(corpus, rows, segment, **settings, rank=rank) for rank in range(world)]
    parts = [list(islice(stream, 12)) for stream in ranks]
    assert {len(part) for part in parts} == {len(whole)}
    joined = [{name: torch.cat([part[name] for part in step]) for name in NAMES} for step in zip(*parts, strict=True)]
    assert equal(joined, whole)
    assert all(stream.state_dict() == ranks[0].state_dict() for stream in ranks)


def test_seeds_and_epochs_shuffle_differently(toy):
    corpus = toy([3] * 30)

    def order(seed: int, shuffle: bool = True) -> list[list[int]]:
        return [inputs for inputs, _ in spans(list(DocumentStreams(corpus, 1, 5, seed, shuffle, epochs=2)))[0]]

    in_order = [ids.tolist() for ids in corpus]
    assert order(0, shuffle=False) == in_order * 2
    assert order(1) == order(1) != order(2)
    assert order(1)[:30] != order(1)[30:]
    assert order(1)[:30] != in_order


def equal(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in NAMES
    )


@pytest.mark.parametrize("change", [{"seed": 1}, {"segment_length": 7}, {"shuffle": False}, {"epochs": 1}])
def test_a_state_of_other_settings_is_refused(toy, change):
    settings: dict[str, Any] = {"batch_size": 2, "segment_length": 5, "seed": 0}
    state = DocumentStreams(toy([4, 5]), **settings).state_dict()
    with pytest.raises(UsageError, match=f"saved with {next(iter(change))} = "):
        DocumentStreams(toy([4, 5]), **settings | change).load_state_dict(state)
    with pytest.raises(UsageError, match="saved with corpus = "):
        DocumentStreams(toy([4, 6]), **settings).load_state_dict(state)
    with pytest.raises(UsageError, match="saved with row_count = 2"):
        DocumentStreams(toy([4, 5]), **settings, world_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"segment_length": 0}, {"epochs": 0}, {"rank": 1}, {"rank": -1}, {"world_size": 0}]
)
def test_bad_settings_are_refused(toy, bad):
    with pytest.raises(UsageError, match=f"{next(iter(bad))} = {next(iter(bad.values()))}: expected"):
        DocumentStreams(toy([1]), **{"batch_size": 1, "segment_length": 1} | bad)


# The order


@given(st.integers(1, 300), st.integers(-(2**70), 2**70), st.integers(0, 100))
def test_shuffled_is_a_permutation(count, seed, epoch):
    assert sorted(shuffled(place, count, seed, epoch) for place in range(count)) == list(range(count))


def test_shuffled_is_even():
    """Each of 5 things comes at each of 5 places about equally often: chi-square under its 99.9 % point."""
    draws = 4000
    counts = Counter((place, shuffled(place, 5, 7, epoch)) for epoch in range(draws) for place in range(5))
    expected = draws / 5
    assert sum((counts[p, n] - expected) ** 2 / expected for p in range(5) for n in range(5)) < 39.3
    orders = Counter(tuple(shuffled(place, 4, 7, epoch) for place in range(4)) for epoch in range(draws))
    assert len(orders) == 24
