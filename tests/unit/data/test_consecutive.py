from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mnemic.data import ConsecutiveSegments, SimilarSegments
from mnemic.errors import UsageError

from .test_streams import LENGTHS, NAMES, SEEDS, SEGMENTS, equal

STREAMS, CONSECUTIVE = st.integers(1, 3), st.integers(1, 4)


@given(LENGTHS, STREAMS, CONSECUTIVE, SEGMENTS, SEEDS, st.sampled_from([None, 1, 2]))
def test_rows_of_a_stretch_follow_each_other(toy, lengths, streams, m, length, seed, epochs):
    corpus = toy(lengths)
    batches = list(islice(ConsecutiveSegments(corpus, streams * m, length, m, seed, epochs), 12))
    whole = list(islice(SimilarSegments(corpus, streams, length * m, seed, shuffled=True, epochs=epochs), 12))
    assert len(batches) == len(whole)
    for batch, wide in zip(batches, whole, strict=True):
        wide["document_starts"][:, 0] = False
        for name in NAMES:
            assert batch[name].shape == (streams * m, length)
            for row in range(streams * m):
                part = row % m
                assert torch.equal(batch[name][row], wide[name][row // m, part * length : (part + 1) * length])


@given(LENGTHS, STREAMS, CONSECUTIVE, SEGMENTS)
def test_a_pass_scores_each_token_once(toy, lengths, streams, m, length):
    corpus = toy(lengths)
    batches = ConsecutiveSegments(corpus, streams * m, length, m, epochs=1)
    assert sum(int((batch["targets"] != -100).sum()) for batch in batches) == corpus.target_count


def test_stretches_come_in_random_order_and_whole(toy):
    corpus = toy([22])
    tokens = corpus[0].tolist()
    first, second = islice(ConsecutiveSegments(corpus, 3, 4, 3, epochs=1), 2)
    if first["input_ids"][0, 0] != tokens[0]:
        first, second = second, first
    assert first["input_ids"].tolist() == [tokens[0:4], tokens[4:8], tokens[8:12]]
    assert second["input_ids"].tolist() == [tokens[12:16], tokens[16:20], tokens[20:24]]
    assert first["targets"][1].tolist() == tokens[5:9]
    for batch in (first, second):
        assert not batch["document_starts"].any()
        assert batch["streams"].tolist() == [0, 0, 0]


def test_batches_are_not_read_in_order(toy):
    batches = ConsecutiveSegments(toy([1000]), 2, 5, 2, epochs=1)
    firsts = [int(batch["input_ids"][0, 0]) for batch in batches]
    ordered = [int(token) for token in batches._stretches.corpus[0][::10]]
    assert firsts != ordered
    assert sorted(firsts) == sorted(ordered)


@given(LENGTHS, STREAMS, CONSECUTIVE, SEGMENTS, SEEDS, st.integers(0, 8), st.sampled_from([None, 2]))
def test_resuming_gives_the_same_batches(toy, lengths, streams, m, length, seed, steps, epochs):
    corpus = toy(lengths)
    stream = ConsecutiveSegments(corpus, streams * m, length, m, seed, epochs=epochs)
    for _ in islice(stream, steps):
        pass
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = ConsecutiveSegments(corpus, streams * m, length, m, seed, epochs=epochs)
    resumed.load_state_dict(state)
    assert equal(list(islice(resumed, 6)), list(islice(stream, 6)))


@given(LENGTHS, st.integers(1, 2), CONSECUTIVE, st.integers(1, 3), SEGMENTS, st.sampled_from([None, 2]))
def test_ranks_share_the_rows_of_one_large_batch(toy, lengths, streams, m, world, length, epochs):
    corpus = toy(lengths)
    rows = streams * m
    whole = list(islice(ConsecutiveSegments(corpus, rows * world, length, m, epochs=epochs), 12))
    ranks = [
        ConsecutiveSegments(corpus, rows, length, m, epochs=epochs, rank=rank, world_size=world)
        for rank in range(world)
    ]
    parts = [list(islice(stream, 12)) for stream in ranks]
    assert {len(part) for part in parts} == {len(whole)}
    joined = [{name: torch.cat([part[name] for part in step]) for name in NAMES} for step in zip(*parts, strict=True)]
    assert equal(joined, whole)
    assert all(stream.state_dict() == ranks[0].state_dict() for stream in ranks)


@pytest.mark.parametrize("wrong", [0, -2, 4, 12])
def test_a_number_that_does_not_divide_the_rows_is_refused(toy, wrong):
    with pytest.raises(UsageError, match=f"consecutive = {wrong}: expected a number that divides the 6 rows"):
        ConsecutiveSegments(toy([5]), 6, 3, wrong)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"segment_length": 0}, {"epochs": 0}, {"rank": 1}, {"world_size": 0}]
)
def test_bad_settings_are_refused(toy, wrong):
    usual: dict[str, Any] = {"batch_size": 4, "segment_length": 3, "consecutive": 2}
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} = {next(iter(wrong.values()))}.*: expected"):
        ConsecutiveSegments(toy([5]), **usual | wrong)


def test_a_state_of_other_settings_is_refused(toy):
    state = ConsecutiveSegments(toy([5, 6]), 4, 6, 2).state_dict()
    with pytest.raises(UsageError, match="saved with consecutive = 2 and has 4"):
        ConsecutiveSegments(toy([5, 6]), 8, 3, 4).load_state_dict(state)
    with pytest.raises(UsageError, match="saved with row_count = 2 and has 3"):
        ConsecutiveSegments(toy([5, 6]), 6, 6, 2).load_state_dict(state)
    with pytest.raises(UsageError, match="saved with seed = 0 and has 1"):
        ConsecutiveSegments(toy([5, 6]), 4, 6, 2, seed=1).load_state_dict(state)
