"""The positional terms against the papers' formulas and against torch's own gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.t5.modeling_t5 import T5Attention

from mnemic.models import MnemicDecoderConfig
from mnemic.models.biased_attention import biased_attention
from mnemic.models.layout import Layout
from mnemic.models.positions import T5Bias, XLRelative, XLTerms, rotary_terms, rotate, sinusoids
from tests.unit.models.conftest import tiny_decoder
from tests.unit.models.naive_decoder import sinusoid


@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (8, 12), (16, 1000)])
def test_t5_buckets_are_those_of_t5(count: int, farthest: int) -> None:
    bias = T5Bias(MnemicDecoderConfig(position="t5", relative_buckets=count, relative_max_distance=farthest))
    distances = torch.arange(-50, 3000)[None, None]
    expected = T5Attention._relative_position_bucket(-distances, False, count, farthest)
    assert torch.equal(bias.buckets(distances), expected)


def test_t5_bias_is_looked_up_for_each_pair_and_row() -> None:
    bias = T5Bias(MnemicDecoderConfig(position="t5", num_attention_heads=4, hidden_size=256))
    with torch.no_grad():
        bias.weight.normal_()
    distances = torch.randint(-5, 300, (2, 3, 7))
    found, buckets = bias(distances), bias.buckets(distances)
    assert found.shape == (2, 4, 3, 7)
    for row, head, query, key in [(0, 0, 0, 0), (1, 3, 2, 6), (0, 2, 1, 5)]:
        assert found[row, head, query, key] == 16 * bias.weight[head, buckets[row, query, key]]


def test_sinusoids_are_the_papers() -> None:
    positions = torch.tensor([-3, 0, 1, 1000])
    expected = torch.stack([sinusoid(p, 8) for p in positions.tolist()])
    torch.testing.assert_close(sinusoids(positions, 8, torch.float64), expected, rtol=1e-12, atol=1e-12)


def test_half_precision_still_tells_large_positions_apart() -> None:
    found = sinusoids(torch.tensor([4096, 4097]), 8, torch.bfloat16)
    assert not torch.equal(found[0], found[1])


def test_rotation_depends_on_the_distance_only_and_keeps_lengths() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64)

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        terms = rotary_terms(torch.tensor([[position]]), 8, 10000.0, torch.float64)
        return rotate(vector.view(1, 1, 1, 1, 8), terms).flatten()

    near, far = turned(query, 7) @ turned(key, 3), turned(query, 1007) @ turned(key, 1003)
    assert near.item() == pytest.approx(far.item(), abs=1e-9)
    assert near.item() != pytest.approx((turned(query, 7) @ turned(key, 4)).item(), abs=1e-3)
    assert turned(query, 99).norm().item() == pytest.approx(query.norm().item())


def test_gradient_of_the_rotation() -> None:
    states = torch.randn(2, 3, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    terms = rotary_terms(torch.tensor([[0, 1, 5], [2, 3, 4]]), 6, 100.0, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, terms), (states,))


@pytest.mark.parametrize("block", [1, 3, 128])
@pytest.mark.parametrize("unseeing", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (3, 1), (1, 1)])
def test_biased_attention_and_its_gradient(
    shape: tuple[int, int], unseeing: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in blocks of queries, and where a query sees nothing and weighs all keys alike."""
    monkeypatch.setattr("mnemic.models.biased_attention.BLOCK", block)
    query = torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(3, 2, 6, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    hidden = torch.full((4, 6), torch.finfo(torch.float64).min, dtype=torch.float64).triu(3)
    if unseeing:
        hidden[1] = torch.finfo(torch.float64).min
    bias = (torch.randn(*shape, 4, 6, dtype=torch.float64) + hidden).requires_grad_()
    inputs = (query, key, value, bias)
    found = biased_attention(*inputs, 0.7)
    plain = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.7)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
    above = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, inputs, above), torch.autograd.grad(plain, inputs, above), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("block", [1, 2, 128])
def test_xl_scores_are_the_papers(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry of the score matrix, by the shift in blocks and by looking up distances, is the formula's."""
    monkeypatch.setattr("mnemic.models.positions.BLOCK", block)
    config = MnemicDecoderConfig(position="xl", hidden_size=8, num_attention_heads=2)
    relative = XLRelative(config, 2, 4).double()
    with torch.no_grad():
        for parameter in relative.parameters():
            parameter.normal_()
    query = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(5)[None]
    layout = Layout(positions[:, 2:], positions)
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)
    mask = torch.zeros(1, 1, 3, 5, dtype=torch.float64).masked_fill(~seen, -1e30)
    mask[..., 0] -= 0.5  # what the mask says of tokens in sight counts too
    given = mask.clone()
    slopes = torch.randn(2, 2, 3, 5, dtype=torch.float64) * seen
    found = []
    for causal in (True, False):
        terms = XLTerms.of(layout, causal, 8, torch.float64)
        assert (terms.index is None) is causal
        scores = relative(query, terms, mask)[1]
        gradients = torch.autograd.grad(scores, [query, relative.position_bias, relative.projection.weight], slopes)
        found.append([scores * seen, *gradients])
        assert (scores[..., ~seen] < -1e29).all()
    assert torch.equal(mask, given)
    for by_shift, by_look_up in zip(*found, strict=True):
        torch.testing.assert_close(by_shift, by_look_up)
    for head in range(2):
        weight = relative.projection.weight[head * 4 : head * 4 + 4]
        for i in range(3):
            for j in range(i + 3):
                wanted = (query[1, head, i] + relative.position_bias[head]) @ weight @ sinusoid(i + 2 - j, 8) / 2
                assert found[0][0][1, head, i, j].item() == pytest.approx((wanted + mask[0, 0, i, j]).item())


def test_all_ways_to_attend_agree(position: str) -> None:
    """Written-out attention, torch's function, and our own with its backward give the same losses and gradients."""
    ids = torch.randint(2, 61, (2, 9))
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[1, 4] = True
    found = []
    for implementation in ("sdpa", "eager"):
        model = tiny_decoder(position).train()
        model.set_attn_implementation(implementation)
        losses, _ = model.token_losses(ids, input_ids=ids, document_starts=starts)
        losses.sum().backward()
        found.append((losses, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_layout_in_step() -> None:
    """Columns stand for positions only while they rise together within every document."""
    rising = torch.arange(6)[None]
    assert Layout(rising, rising).in_step()
    assert Layout(rising + 90, rising + 90).in_step()
    assert not Layout(rising * 2, rising * 2).in_step()
    restarted = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert not Layout(restarted, restarted).in_step()
    assert Layout(restarted, restarted, documents=torch.tensor([[0, 0, 0, 1, 1, 1]])).in_step()
    gap = torch.tensor([[0, 1, 1, 2, 3, 4]])  # one padding token between two tokens of a document
    assert not Layout(gap, gap, documents=torch.tensor([[0, 0, -1, 0, 0, 0]])).in_step()
    assert Layout(rising, rising, documents=torch.tensor([[-1, -1, 0, 0, 0, -1]])).in_step()
    assert not Layout(rising, rising, prefix=1).in_step()
    assert math.prod(Layout(rising[:, 4:], rising).distances().shape) == 12
