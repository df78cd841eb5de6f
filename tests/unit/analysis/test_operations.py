"""The operations of Memory Transformer's section 3.2 are found in maps made by hand, and only there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mnemic.analysis.operations import (
    NONE,
    OPERATIONS,
    blocks,
    chosen,
    measures,
    shared,
    strengths,
    strongest,
)

M, N = 10, 12  # memory tokens, tokens of the text
WAYS = ("copy_kept", "copy_reversed", "copy_same")


def even() -> Tensor:
    return torch.full((M, M), 1 / M, dtype=torch.float64)


def band(reach: int) -> Tensor:
    """Each token takes alike from itself and from `reach` neighbours on each side."""
    places = torch.arange(M)
    near = ((places[:, None] - places).abs() <= reach).double()
    return near / near.sum(1, keepdim=True)


def rows_taking(sources: dict[int, list[int]]) -> Tensor:
    """Rows that take alike from the memory tokens named; the others are even."""
    found = even()
    for row, keys in sources.items():
        found[row] = 0
        found[row, keys] = 1 / len(keys)
    return found


def whole(process: Tensor, write: float = 0.0, sequence: Tensor | None = None) -> Tensor:
    """A map of one layer and head: memory rows with this process block and a share written evenly; text rows."""
    full = torch.full((M + N, M + N), 1 / (M + N), dtype=torch.float64)
    full[:M, :M] = process * (1 - write)
    full[:M, M:] = write / N
    if sequence is not None:
        full[M:] = sequence
    return full[None, None]


def found_in(weights: Tensor, causal: bool = False, count: int = M) -> dict[str, float]:
    seen = torch.ones(weights.shape[2:]).tril() if causal else None
    return {name: value.item() for name, value in measures(weights, count, count, seen).items()}


def operation(found: dict[str, float]) -> str:
    kinds = strengths({name: torch.tensor(value) for name, value in found.items()})
    return strongest({name: value.item() for name, value in kinds.items()})


REVERSED = {row: [9 - row] for row in range(5)}  # 0-4 take 9-5
CASES = {
    "identity": (torch.eye(M).double(), "store", None),
    "pairs and threes": (band(1), "fusion", None),
    "a wide soft diagonal": (band(2), "fusion", None),
    "a block moved, order kept": (rows_taking({5: [1], 6: [2], 7: [3], 8: [4]}), "copy", "copy_kept"),
    "all moved by one": (torch.eye(M).double().roll(1, dims=1), "copy", "copy_kept"),
    "all moved by three": (torch.eye(M).double().roll(3, dims=1), "copy", "copy_kept"),
    "a block reversed": (rows_taking(REVERSED), "copy", "copy_reversed"),
    "all reversed": (torch.eye(M).double().flip(0), "copy", "copy_reversed"),
    "a vertical block": (rows_taking({row: [0, 1, 2] for row in range(3, 9)}), "copy", "copy_same"),
    "even": (even(), NONE, None),
    "vertical lines": (rows_taking({row: [2, 5] for row in range(M)}), NONE, None),
    "vertical lines side by side": (rows_taking({row: [0, 1, 2] for row in range(M)}), NONE, None),
    "all rows at one token": (rows_taking({row: [4] for row in range(M)}), NONE, None),
    "all other rows at one token": (rows_taking({row: [4] for row in range(M) if row != 4}), NONE, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("write", [0.0, 0.3])
def test_the_right_operation_wins_and_the_others_stay_low(case: str, write: float) -> None:
    process, expected, way = CASES[case]
    found = found_in(whole(process, write))
    assert operation(found) == expected
    if expected != NONE:
        assert found[expected] >= 0.35 * (1 - write)
    low = [name for name in ("store", "fusion", "copy") if name != expected]
    assert max(found[name] for name in low) <= 0.2 * found.get(expected, 1.0)
    if way is not None:
        assert found["copy"] == pytest.approx(found[way])
        assert max(found[name] for name in WAYS if name != way) <= 0.05
    assert found["write"] == pytest.approx(write)
    assert found["process"] == pytest.approx(1 - write)
    assert found["write_strength"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 4, 20])
def test_what_all_rows_do_is_no_processing_in_a_memory_of_any_size(count: int) -> None:
    """Heads that are passed by look so (section A.2): every row at the same one or few tokens."""
    for keys in range(1, count):
        process = torch.zeros(count, count, dtype=torch.float64)
        process[:, :keys] = 1 / keys
        found = measures(process[None, None], count, count)
        assert [found[name].item() for name in ("store", "fusion", "copy")] == [0, 0, 0]
    assert measures(torch.eye(count)[None, None], count, count)["store"] == 1


def test_clean_patterns_have_the_values_that_the_formulas_give() -> None:
    assert found_in(whole(torch.eye(M)))["store"] == 1
    assert found_in(whole(torch.eye(M), write=0.4))["store"] == pytest.approx(0.6 - 0.4 / N)
    assert found_in(whole(torch.eye(M).roll(3, dims=1)))["copy_kept"] == 1
    assert found_in(whole(torch.eye(M).flip(0)))["copy_reversed"] == 1
    assert found_in(whole(band(1)))["fusion"] == pytest.approx(1)
    assert found_in(whole(band(2)))["fusion"] == pytest.approx((2 * 2 / 3 + 2 * 3 / 4 + 6 * 3 / 5) / M)
    assert found_in(whole(rows_taking({5: [1], 6: [2], 7: [3], 8: [4]})))["copy"] == pytest.approx(0.4)
    assert found_in(whole(rows_taking({4: [0, 1, 2], 5: [0, 1, 2]})))["copy_same"] == pytest.approx(0.2)


def test_a_softer_diagonal_is_less_of_a_store_and_more_of_a_fusion() -> None:
    found = []
    for sharp in (1.0, 0.8, 0.5, 0.34):
        beside = torch.full((M - 1,), (1 - sharp) / 2, dtype=torch.float64)
        process = beside.diag(1) + beside.diag(-1)
        process += (1 - process.sum(1)).diag()
        found.append(found_in(whole(process)))
    assert [one["store"] for one in found] == sorted((one["store"] for one in found), reverse=True)
    assert [one["fusion"] for one in found] == sorted(one["fusion"] for one in found)
    assert [operation(one) for one in found] == ["store", "store", "fusion", "fusion"]


def test_parts_of_a_memory_may_be_used_in_different_ways() -> None:
    """As in Figure 2c: fusion of the first tokens, store in the middle."""
    process = even()
    process[:4], process[4:8] = band(1)[:4], torch.eye(M).double()[4:8]
    found = found_in(whole(process))
    assert found["store"] == pytest.approx(0.4)
    assert found["fusion"] == pytest.approx(0.4)
    assert found["copy"] == 0


def test_tokens_that_all_take_from_each_other_copy_nothing() -> None:
    process = torch.zeros(M, M, dtype=torch.float64)
    process[:5, :5] = process[5:, 5:] = 0.2
    found = found_in(whole(process))
    assert found["copy"] == 0
    assert found["fusion"] > 0.3


def test_writing_and_reading_are_what_rows_prefer_to_an_even_one() -> None:
    """The block's part of the distance (Kullback and Leibler's) to an even row, by hand, in half of the rows."""
    few = torch.zeros(M + N, dtype=torch.float64)
    few[M + 3] = 1
    map_ = whole(even())
    map_[0, 0, : M // 2] = few
    found = found_in(map_)
    assert found["write_strength"] == pytest.approx(0.5)
    assert operation(found) == "write"
    text = torch.full((N, M + N), 1 / (M + N), dtype=torch.float64)
    text[::2] = 0
    text[::2, 2:4] = 0.25
    text[::2, M:] = 0.5 / N
    found = found_in(whole(even(), sequence=text))
    assert found["read"] == pytest.approx(0.5 * 0.5 + 0.5 * M / (M + N))
    assert found["read_strength"] == pytest.approx(0.5 * 0.5 * math.log(22 * 0.25) / math.log(22))
    assert operation(found) == "read"
    some = chosen(torch.tensor([[0.05, 0.0], [0.5, 0.5]]).double(), torch.ones(2, 2), torch.tensor([4.0, 4.0]))
    assert some.tolist() == pytest.approx([0, 0.5])


def test_what_all_rows_write_or_read_alike_is_no_operation() -> None:
    """Vertical lines, as in the sequence's maps of Figure 6; where one row alone is updated it cannot be told."""
    for count, text in ((1, 5), (5, 1), (4, 4)):
        map_ = torch.zeros(1, 1, count + text, count + text, dtype=torch.float64)
        map_[..., :count, count:], map_[..., count:, :count] = 1 / text, 1 / count
        found, many = found_in(map_, count=count), math.log(count + text)
        assert (found["write"], found["read"]) == pytest.approx((1, 1))
        expected = (1 - math.log(text) / many if count == 1 else 0, 1 - math.log(count) / many if text == 1 else 0)
        assert (found["write_strength"], found["read_strength"]) == pytest.approx(expected)
        map_[:] = 0
        map_[..., 0] = 1
        expected = {"read_strength": 1 if text == 1 else 0, "write_strength": 0}
        assert {name: found_in(map_, count=count)[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("rows", "alike"), [(8, 3), (9, 0), (12, 0)])
def test_what_three_quarters_of_the_rows_do_is_what_all_do(rows: int, alike: int) -> None:
    text = torch.full((N, M + N), 1 / (M + N), dtype=torch.float64)
    text[:rows] = 0
    text[:rows, 2] = 1
    found = found_in(whole(even(), sequence=text))["read_strength"]
    assert found == pytest.approx(rows / N if alike else 0, abs=1e-9)


def test_what_a_row_cannot_see_is_not_what_it_prefers_something_to() -> None:
    """The sequence of a bottleneck sees the memory alone: even attention to all of it is no choice."""
    map_, seen = torch.zeros(1, 1, M + N, M + N, dtype=torch.float64), torch.ones(M + N, M + N)
    map_[..., :M, :], map_[..., M:, :M] = 1 / (M + N), 1 / M
    seen[M:, M:] = 0
    found = measures(map_, M, M, seen)
    assert (found["read"].item(), found["read_strength"].item()) == pytest.approx((1, 0))
    map_[..., M:, :M] = torch.eye(M).repeat(2, 1)[:N]
    assert measures(map_, M, M, seen)["read_strength"].item() == pytest.approx(1)


def test_what_is_written_in_order_is_no_copy() -> None:
    map_ = whole(even())
    map_[..., :M, :] = 0
    map_[..., :M, M : 2 * M] = torch.eye(M)
    found = found_in(map_)
    assert (found["copy"], operation(found)) == (0, "write")


def test_blocks_that_copy_each_other_are_copied() -> None:
    process = torch.zeros(M, M, dtype=torch.float64)
    process[:5, 5:] = process[5:, :5] = 0.2
    found = found_in(whole(process))
    assert (found["copy_same"], operation(found)) == (pytest.approx(1), "copy")


def test_a_decoder_that_reads_a_memory_can_do_nothing_else() -> None:
    reading = torch.zeros(1, 1, N, M + N)
    reading[..., ::2, 3] = reading[..., 1::2, 4] = 1.0
    found = measures(reading, 0, M)
    assert found["read"] == found["read_strength"] == 1
    assert all(found[name] == 0 for name in found if not name.startswith("read"))


def test_what_a_causal_memory_must_do_is_not_counted() -> None:
    """Its first token sees itself alone; even attention over what each token sees is no operation."""
    lower = torch.ones(M + N, M + N, dtype=torch.float64).tril()
    found = found_in((lower / lower.sum(1, keepdim=True))[None, None], causal=True)
    nothing = [found[name] for name in ("store", "fusion", "copy", "write", "read_strength")]
    assert nothing == pytest.approx([0] * 5, abs=1e-12)
    assert found["process"] == 1
    found = found_in(torch.eye(M + N)[None, None], causal=True)
    assert (found["store"], found["copy"], found["fusion"]) == (1, 0, 0)
    lower = torch.ones(3, 3).tril()
    one = measures(lower[None, None], 1, 1, lower)
    assert one["store"] == 0


@pytest.mark.parametrize("weights", [[], [0.4], [0.5, 0.0], [0.25, 0.25], [0.6, 0.2, 0.2], [0.2, 0.2, 0.2]])
def test_shared_is_what_can_be_paired(weights: list[float]) -> None:
    """By hand: pieces of 1/1000 on two different keys are taken away together as long as there are any."""
    left, pieces = [round(1000 * weight) for weight in weights], 0
    while sum(piece > 0 for piece in left) > 1:
        largest = sorted(range(len(left)), key=lambda place: left[place])[-2:]
        for place in largest:
            left[place] -= 1
        pieces += 2
    assert shared(torch.tensor(weights, dtype=torch.float64)).item() == pytest.approx(pieces / 1000, abs=2e-3)


shapes = st.tuples(st.integers(1, 7), st.integers(0, 6), st.floats(0, 8), st.booleans(), st.integers(0, 10_000))


@given(shapes)
def test_masses_of_each_row_sum_to_one_and_measures_stay_between_0_and_1(
    shape: tuple[int, int, float, bool, int],
) -> None:
    count, text, sharpness, causal, seed = shape
    scores = torch.randn(2, 3, count + text, count + text, generator=torch.Generator().manual_seed(seed)) * sharpness
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1)
    for queries in (0, count):
        cut = blocks(weights, queries, count)
        for one, other in (("write", "process"), ("update", "read")):
            sums = cut[one].sum(-1) + cut[other].sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums))
        found = measures(weights, queries, count, torch.ones(weights.shape[2:]).tril() if causal else None)
        assert {value.shape for value in found.values()} == {(2, 3)}
        for name, value in found.items():
            assert ((value >= 0) & (value <= 1)).all(), name
        if queries:
            torch.testing.assert_close(found["write"] + found["process"], torch.ones(2, 3).double())
        assert set(strengths(found)) == set(OPERATIONS)
        assert (found["copy"] >= torch.stack([found[way] for way in WAYS]).amax(0) - 1e-9).all()
