"""The XL cache: segments equal one long forward, documents and padding stay apart, state is saved exactly."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from mnemic.errors import UsageError
from mnemic.models import EVERY, PADDING, MnemicDecoderConfig, MnemicDecoderForCausalLM, XLCache, visibility
from tests.unit.models.conftest import KINDS, tiny_decoder
from tests.unit.models.naive_decoder import naive_logits

ROWS, LENGTH = 2, 14


@functools.cache
def model_of(position: str, xl_length: int) -> MnemicDecoderForCausalLM:
    return tiny_decoder(position, xl_length=xl_length)


def tokens(seed: int, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(2, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_segments(model: MnemicDecoderForCausalLM, ids: Tensor, starts: Tensor | None, cuts: list[int]) -> Tensor:
    cache = model.new_cache(ids.shape[0])
    bounds = [0, *cuts, ids.shape[1]]
    logits = []
    for low, high in itertools.pairwise(bounds):
        part = None if starts is None else starts[:, low:high]
        logits.append(model(ids[:, low:high], past_key_values=cache, document_starts=part).logits)
        assert cache.length <= cache.limit
    return torch.cat(logits, dim=1)


cuts = st.sets(st.integers(1, LENGTH - 1), max_size=5).map(sorted)
documents = st.lists(st.sets(st.integers(0, LENGTH - 1), max_size=3), min_size=ROWS, max_size=ROWS)


def as_starts(rows: list[set[int]]) -> Tensor:
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for row, places in enumerate(rows):
        starts[row, list(places)] = True
    return starts


@settings(max_examples=100, deadline=None, derandomize=True)
@given(position=st.sampled_from(KINDS), cuts=cuts, rows=documents, seed=st.integers(0, 99))
@torch.no_grad()
def test_segments_equal_one_long_forward(position: str, cuts: list[int], rows: list[set[int]], seed: int) -> None:
    model, ids, starts = model_of(position, 50), tokens(seed), as_starts(rows)
    whole = model(ids, document_starts=starts).logits
    torch.testing.assert_close(in_segments(model, ids, starts, cuts), whole, rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(position=st.sampled_from(KINDS), limit=st.integers(1, 8), cuts=cuts, rows=documents, seed=st.integers(0, 99))
@torch.no_grad()
def test_a_short_cache_equals_naive_masked_attention(
    position: str, limit: int, cuts: list[int], rows: list[set[int]], seed: int
) -> None:
    model, ids, starts = model_of(position, limit), tokens(seed), as_starts(rows)
    found = in_segments(model, ids, starts, cuts)
    begin = torch.tensor([max([0, *[cut for cut in cuts if cut <= i]]) for i in range(LENGTH)])
    seen = torch.arange(LENGTH)[None, :] >= begin[:, None] - limit  # each token: its segment and `limit` tokens before
    for row in range(ROWS):
        expected = naive_logits(model, ids[row], starts[row], seen)
        torch.testing.assert_close(found[row], expected, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_the_limit_matters(position: str) -> None:
    ids = tokens(3)
    short, long = (in_segments(model_of(position, limit), ids, None, [7]) for limit in (2, 50))
    assert (short[:, 7:] - long[:, 7:]).abs().max() > 1e-3


def test_no_gradient_flows_into_the_cache(position: str) -> None:
    model, ids = model_of(position, 50), tokens(1)
    cache = model.new_cache(ROWS)
    first = model.model.embed_tokens(ids[:, :6]).detach().requires_grad_()
    second = model.model.embed_tokens(ids[:, 6:]).detach().requires_grad_()
    model(inputs_embeds=first, past_key_values=cache)
    assert not any(tensor.requires_grad for tensor in cache.tensors().values())
    model(inputs_embeds=second, past_key_values=cache).logits.sum().backward()
    assert first.grad is None
    assert second.grad is not None
    model.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(position: str, side: str) -> None:
    """Rows of different lengths in each segment equal rows run alone, with a cache so short that room counts."""
    model, ids = model_of(position, 5), tokens(2)
    lengths = [(4, 2), (1, 4), (0, 3), (5, 3)]  # real tokens of each row in each segment
    cache, places = model.new_cache(ROWS), [0, 0]
    alone = [model.new_cache(1) for _ in range(ROWS)]
    for pair in lengths:
        width = max(pair) + 1
        block, mask = torch.zeros(ROWS, width, dtype=torch.long), torch.zeros(ROWS, width, dtype=torch.long)
        for row, count in enumerate(pair):
            where = slice(width - count, width) if side == "left" else slice(0, count)
            block[row, where] = ids[row, places[row] : places[row] + count]
            mask[row, where] = 1
        together = model(block, attention_mask=mask, past_key_values=cache).logits
        assert together.isfinite().all()
        for row, count in enumerate(pair):
            if count:
                part = ids[row : row + 1, places[row] : places[row] + count]
                single = model(part, past_key_values=alone[row]).logits
                torch.testing.assert_close(together[row][mask[row] == 1], single[0], rtol=1e-9, atol=1e-9)
            places[row] += count
    assert cache.next_position.tolist() == places


@torch.no_grad()
def test_memory_tokens_in_front_are_read_but_not_stored(position: str) -> None:
    """Three memory vectors before every segment: seen by every document, seeing only themselves, never cached."""
    model, ids = model_of(position, 50), tokens(4)
    starts = as_starts([{0, 9}, {3}])
    memory = torch.randn(1, 3, 16, dtype=torch.float64).expand(ROWS, -1, -1)
    plain = in_segments(model, ids, starts, [5, 8])

    def run(cuts: list[int], explicit: bool) -> tuple[Tensor, XLCache]:
        cache = model.new_cache(ROWS)
        cache.prefix = 3
        logits, bounds = [], [0, *cuts, LENGTH]
        for low, high in itertools.pairwise(bounds):
            embeds = torch.cat([memory, model.model.embed_tokens(ids[:, low:high])], dim=1)
            marks = torch.cat([torch.zeros(ROWS, 3, dtype=torch.bool), starts[:, low:high]], dim=1)
            mask = None
            if explicit:
                new = cache.document[:, None] + starts[:, low:high].cumsum(1)
                queries = torch.cat([torch.full((ROWS, 3), EVERY), new], dim=1)
                keys = torch.cat([cache.documents, queries], dim=1)
                order = torch.arange(keys.shape[1])[None]
                mask = visibility(queries, keys, order[:, -queries.shape[1] :], order, torch.float64)
            outputs = model(inputs_embeds=embeds, attention_mask=mask, document_starts=marks, past_key_values=cache)
            logits.append(outputs.logits[:, 3:])
        return torch.cat(logits, dim=1), cache

    whole, cache = run([], explicit=False)
    parts, split = run([5, 8], explicit=False)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(run([5, 8], explicit=True)[0], whole, rtol=1e-9, atol=1e-9)
    assert (whole - plain).abs().max() > 1e-3
    assert cache.length == split.length == cache.get_seq_length() == LENGTH
    assert split.positions.tolist() == cache.positions.tolist()


@torch.no_grad()
def test_padding_in_a_4d_mask_is_not_stored() -> None:
    model, ids = model_of("rotary", 50), tokens(5)
    cache = model.new_cache(ROWS)
    numbers = torch.zeros(ROWS, 6, dtype=torch.long)
    numbers[1, :2] = PADDING
    order = torch.arange(6)[None]
    model(ids[:, :6], attention_mask=visibility(numbers, numbers, order, order, torch.float64), past_key_values=cache)
    assert (cache.documents == PADDING).sum(1).tolist() == [0, 2]
    assert cache.next_position.tolist() == [6, 4]


@torch.no_grad()
def test_reset_of_rows_and_of_all(position: str) -> None:
    model, ids = model_of(position, 50), tokens(6)
    cache = model.new_cache(ROWS)
    model(ids[:, :6], past_key_values=cache)
    cache.reset([1])
    after = model(ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(after[0], model(ids[:1]).logits[0, 6:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after[1], model(ids[1:, 6:]).logits[0], rtol=1e-9, atol=1e-9)
    cache.reset()
    assert cache.length == cache.get_seq_length() == 0
    again = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(again, model(ids).logits, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_saved_and_loaded_exactly(position: str) -> None:
    model, ids = model_of(position, 5), tokens(7)
    cache = model.new_cache(ROWS)
    model(ids[:, :9], past_key_values=cache, document_starts=as_starts([{3}, {0, 8}])[:, :9])
    other = model.new_cache(ROWS)
    other.load_tensors(cache.tensors())
    saved = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    expected = model(ids[:, 9:], past_key_values=cache).logits
    assert torch.equal(model(ids[:, 9:], past_key_values=other).logits, expected)
    assert saved.keys() == cache.tensors().keys()
    other.load_tensors(saved)  # the forward in between changed nothing that was saved
    assert torch.equal(model(ids[:, 9:], past_key_values=other).logits, expected)
    empty = model.new_cache(ROWS)
    other.load_tensors(empty.tensors())
    assert other.length == other.get_seq_length() == 0


def test_tensors_of_something_else_are_refused() -> None:
    model = model_of("rotary", 5)
    cache = model.new_cache(ROWS)
    with pytest.raises(UsageError, match="missing document"):
        cache.load_tensors({})
    larger = model_of("rotary", 50).new_cache(ROWS)
    model_of("rotary", 50)(tokens(8), past_key_values=larger)
    with pytest.raises(UsageError, match="14 tokens"):
        cache.load_tensors(larger.tensors())


@torch.no_grad()
def test_rows_can_be_moved(position: str) -> None:
    model, ids = model_of(position, 50), tokens(9)
    starts = as_starts([{4}, {2}])
    alone = [in_segments(model, ids[[row]], starts[[row]], [7])[0, 7:] for row in range(ROWS)]

    def filled() -> XLCache:
        cache = model.new_cache(ROWS)
        model(ids[:, :7], past_key_values=cache, document_starts=starts[:, :7])
        return cache

    def continued(cache: XLCache, rows: list[int]) -> None:
        found = model(ids[rows, 7:], past_key_values=cache).logits
        for logits, row in zip(found, rows, strict=True):
            torch.testing.assert_close(logits, alone[row], rtol=1e-9, atol=1e-9)

    cache = filled()
    cache.reorder_cache(torch.tensor([1, 1]))
    continued(cache, [1, 1])
    cache = filled()
    cache.batch_select_indices(torch.tensor([1]))
    continued(cache, [1])
    cache = filled()
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    continued(cache, [0, 0, 1, 1])


def test_activation_checkpointing_reads_and_writes_once(position: str) -> None:
    """Two segments forward before either is gone back through: the second run of a layer must see the old cache."""
    ids, found = tokens(10), []
    for checkpointing in (False, True):
        model = tiny_decoder(position, xl_length=6).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        cache = model.new_cache(ROWS)
        losses = [
            model.token_losses(ids[:, low + 1 : high + 1], input_ids=ids[:, low:high], past_key_values=cache)[0].sum()
            for low, high in ((0, 5), (5, 9), (9, 13))
        ]
        sum(losses).backward()
        found.append(([loss.item() for loss in losses], model, cache.tensors()))
    (plain, first, cached), (again, second, recached) = found
    assert plain == pytest.approx(again, rel=1e-12)
    assert all(torch.equal(cached[name], recached[name]) for name in cached)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_a_copy_shares_nothing() -> None:
    model, ids = model_of("rotary", 50), tokens(11)
    cache = model.new_cache(ROWS)
    model(ids[:, :6], past_key_values=cache)
    other = copy.deepcopy(cache)
    model(ids[:, 6:], past_key_values=other)
    assert cache.length == 6
    assert other.length == LENGTH


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_generate_with_an_xl_cache(position: str, options: dict[str, int]) -> None:
    model, ids = model_of(position, 50), tokens(12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    beams = options.get("num_beams", 1)
    cache = model.new_cache(ROWS * beams)
    common = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **options}
    assert torch.equal(
        model.generate(ids, past_key_values=cache, **common), model.generate(ids, use_cache=False, **common)
    )


@torch.no_grad()
def test_generate_goes_on_in_the_document_the_cache_is_in(position: str) -> None:
    """A document began in mid-segment: its positions go on, not the count of all tokens that generate keeps."""
    model, ids = model_of(position, 50), tokens(14)
    starts = as_starts([{4}, {9}])
    cache = model.new_cache(ROWS)
    model(ids[:, :12], past_key_values=cache, document_starts=starts[:, :12])
    found = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    for row, start in enumerate((4, 9)):
        alone = model.generate(ids[[row], start:], max_new_tokens=6, do_sample=False, use_cache=False)
        assert found[row, start : start + alone.shape[1]].tolist() == alone[0].tolist()


def test_wrong_use_is_refused() -> None:
    model, ids = model_of("rotary", 5), tokens(13)
    with pytest.raises(UsageError, match="the XL cache has 3 rows, the input 2"):
        model(ids, past_key_values=model.new_cache(3))
    with pytest.raises(UsageError, match="xl_length"):
        tiny_decoder("rotary").new_cache(2)
    with pytest.raises(UsageError, match="cannot be cropped"):
        model.new_cache(2).crop(-1)
    with pytest.raises(UsageError, match="document_starts of shape"):
        model(ids, document_starts=torch.zeros(2, 3, dtype=torch.bool))
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    with pytest.raises(UsageError, match="knows no documents"):
        model(ids, past_key_values=cache, document_starts=torch.zeros(2, LENGTH, dtype=torch.bool))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "t5", "xl"])
def test_the_first_segment_does_not_see_the_future(position: str, implementation: str) -> None:
    torch.manual_seed(0)
    config = MnemicDecoderConfig(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        xl_length=20,
        position=position,
        initializer_range=0.3,
        attn_implementation=implementation,
    )
    model = MnemicDecoderForCausalLM(config).eval()
    ids = torch.randint(2, 61, (1, 8))
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 61
    with torch.no_grad():
        before, after = (model(given, past_key_values=model.new_cache(1)).logits for given in (ids, changed))
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-2
