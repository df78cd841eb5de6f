"""Who sees whom, against the rules written out with loops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mnemic.models import EVERY, PADDING, visibility
from mnemic.models.masks import additive, real_tokens

numbers = st.lists(st.sampled_from([PADDING, EVERY, 0, 1, 2]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), queries=numbers, keys=numbers)
def test_visibility_follows_the_rules(data: st.DataObject, queries: list[int], keys: list[int]) -> None:
    orders = [data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)) for n in (len(queries), len(keys))]
    tensors = [torch.tensor([values]) for values in (queries, keys, *orders)]
    found = visibility(*tensors, torch.float32)
    assert found.shape == (1, 1, len(queries), len(keys))
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            same = (query == key or key == EVERY) and PADDING not in (query, key)
            seen = same and orders[1][j] <= orders[0][i]
            assert found[0, 0, i, j] == (0 if seen else torch.finfo(torch.float32).min)


def test_memory_is_seen_by_every_document_and_sees_only_itself() -> None:
    documents = torch.tensor([[EVERY, EVERY, 5, 5, 6, PADDING]])
    order = torch.tensor([[0, 0, 2, 3, 4, 5]])
    found = visibility(documents, documents, order, order, torch.float64)[0, 0] == 0
    assert found.int().tolist() == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_additive_masks() -> None:
    assert additive(torch.tensor([True, False]), torch.float32).tolist() == [0, torch.finfo(torch.float32).min]
    given = torch.tensor([0.0, -3.0])
    assert additive(given, torch.float64).tolist() == [0.0, -3.0]
    lowest = torch.full((1,), torch.finfo(torch.float32).min)
    assert additive(lowest, torch.bfloat16).isfinite().all()


def test_real_tokens_of_flat_and_square_masks() -> None:
    flat = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]])
    assert real_tokens(flat, 2).tolist() == [[False, True], [True, True]]
    square = torch.zeros(1, 1, 2, 3)
    square[0, 0, 0] = torch.finfo(torch.float32).min
    assert real_tokens(square, 2).tolist() == [[False, True]]
    assert real_tokens(square == 0, 2).tolist() == [[False, True]]
