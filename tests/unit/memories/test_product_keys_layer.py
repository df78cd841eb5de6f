"""The mathematics of product keys: brute force over all slots, and the formulas one number after the other."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mnemic.memories.product_keys.layer import ProductKeyLayer, ValueTable, best_pairs
from mnemic.memories.product_keys.selecting import quick_best_pairs

WIDTH, HEADS, KEY_DIM, SLOTS, K = 6, 2, 8, 25, 4

SELECTIONS = pytest.mark.parametrize("select", [best_pairs, quick_best_pairs], ids=["plain", "quick"])


def draw_scores(data: st.DataObject) -> tuple[Tensor, int]:
    """Scores (heads, 2, N, C), some of them equal or different in their last bits only, and how many pairs to find."""
    heads, tokens, codebook = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 72))
    few = st.integers(1, max(codebook // 4 - 4, 1))  # of which the quick way does not leave it to the plain one
    k = data.draw(st.one_of(few, few, st.integers(1, codebook**2), st.just(codebook**2)))
    torch.manual_seed(data.draw(st.integers(0, 2**30)))
    scores = torch.randn(heads, 2, tokens, codebook, dtype=data.draw(st.sampled_from([torch.float32, torch.float64])))
    kind = data.draw(st.sampled_from(["any", "rounded", "near"]))
    if kind == "rounded":  # many equal scores, whose sums are exact
        scores = scores.round()
    elif kind == "near":
        scores = torch.sign(scores) * (1 + torch.randint(64, scores.shape) * 2.0**-22)
    return scores, k


@SELECTIONS
@settings(max_examples=300)
@given(data=st.data())
def test_the_best_pairs_are_those_of_brute_force(select: Callable[[Tensor, int], Tensor], data: st.DataObject) -> None:
    scores, k = draw_scores(data)
    heads, _, tokens, codebook = scores.shape
    pairs = select(scores, k)
    assert pairs.shape == (heads, 2, tokens, k)
    assert pairs.min() >= 0
    assert pairs.max() < codebook
    found = pairs[:, 0] * codebook + pairs[:, 1]
    every = (scores[:, 0, :, :, None] + scores[:, 1, :, None, :]).flatten(-2)  # of slot C i + j
    for row, slots in zip(every.flatten(0, 1), found.flatten(0, 1), strict=True):
        assert len(set(slots.tolist())) == k  # none twice
        # which of several equal ones is any's choice, and so the scores are compared
        assert torch.equal(row[slots].sort(descending=True).values, row.topk(k).values)


def test_many_tokens_are_shared_out_among_threads() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 2, 2500, 64)
    scores[1, 0, 1500, :20] = 7.0  # in one part the plain way has to be asked
    found, expected = quick_best_pairs(scores, 8), best_pairs(scores, 8)

    def sums(pairs: Tensor) -> Tensor:
        return scores.gather(-1, pairs).sum(1).sort(-1).values

    assert torch.equal(sums(found), sums(expected))
    slots, others = (pairs[:, 0, 0] * 64 + pairs[:, 1, 0] for pairs in (found, expected))
    assert torch.equal(slots.sort(-1).values, others.sort(-1).values)


@pytest.mark.parametrize("odd", [-math.inf, math.inf, math.nan])
def test_scores_that_are_no_numbers_are_chosen_as_the_plain_way_does(odd: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 2, 5, 64)
    scores[0, 1, 2, [7, 30]] = odd
    found, expected = (pairs.sort(-1).values for pairs in (quick_best_pairs(scores, 8), best_pairs(scores, 8)))
    others = [(head, token) for head in range(2) for token in range(5) if (head, token) != (0, 2)]
    for head, token in others:
        assert torch.equal(found[head, :, token], expected[head, :, token])
    assert (found[0, 1, 2] == 7).any() == (expected[0, 1, 2] == 7).any() == (odd != -math.inf)


def test_ties_are_found_by_helpers_in_inference_mode_too() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch.inference_mode():
            scores = torch.zeros(4, 2, 2500, 64) + 1
            pairs = quick_best_pairs(scores, 8)
    finally:
        torch.set_num_threads(threads)
    slots = (pairs[:, 0] * 64 + pairs[:, 1]).sort(-1).values
    assert (slots[..., 1:] > slots[..., :-1]).all()  # eight different ones, all as good as any


def test_a_row_with_too_many_and_one_with_too_few_do_not_make_up_for_each_other() -> None:
    torch.manual_seed(0)
    scores = torch.randn(1, 2, 2, 64)
    scores[0, :, 0, :16] = 5.0 + torch.arange(16)  # sums of whole numbers, many of them equal
    scores[0, 1, 1, 3] = math.nan
    assert torch.equal(
        quick_best_pairs(scores, 8)[0, :, 0].sum(0).sort().values, best_pairs(scores, 8)[0, :, 0].sum(0).sort().values
    )


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot take small numbers for 0")
def test_numbers_that_the_processor_takes_for_0_keep_their_places() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 2, 500, 64).clamp(max=0) * (torch.rand(2, 2, 500, 64) > 0.05)  # the best are zeros
    torch.set_flush_denormal(True)
    try:
        pairs = quick_best_pairs(scores, 4)
    finally:
        torch.set_flush_denormal(False)
    slots = (pairs[:, 0] * 64 + pairs[:, 1]).sort(-1).values
    assert (slots[..., 1:] > slots[..., :-1]).all()
    found, best = (scores.gather(-1, some).sum(1).sort(-1).values for some in (pairs, best_pairs(scores, 4)))
    assert torch.equal(found, best)


def test_a_forked_process_finds_slots_too() -> None:
    scores = torch.randn(2, 2, 5, 64)
    expected = quick_best_pairs(scores, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn of what is tested here
        child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if torch.equal(quick_best_pairs(scores, 8), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def naive(layer: ProductKeyLayer, values: Tensor, x: Tensor) -> Tensor:
    """PKM(x) from the formulas, slot by slot, in the precision of the parameters."""
    codebook, half = layer.keys.shape[2], layer.keys.shape[3]
    width = 2 * half
    raw = torch.stack([layer.query.weight @ token + layer.query.bias for token in x])
    queries = naive_norm(layer, raw, width)
    rows = []
    for number, token in enumerate(x):
        total = torch.zeros_like(values[0])
        for head in range(layer.heads):
            query = queries[number][head * width : (head + 1) * width]
            parts, keys = (query[:half], query[half:]), layer.keys[head]
            scores = []
            for i in range(codebook):
                for j in range(codebook):
                    pairs = ((parts[0], keys[0][i]), (parts[1], keys[1][j]))
                    if layer.scale is None:
                        scores.append(sum((a * b).sum() for a, b in pairs))
                    else:
                        cosine = sum((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt() for a, b in pairs)
                        scores.append(layer.scale[head] * cosine)
            best = sorted(range(len(scores)), key=lambda slot, s=scores: -s[slot].item())[: layer.k]
            powers = [torch.exp(scores[slot]) for slot in best]
            for slot, power in zip(best, powers, strict=True):
                total = total + power / sum(powers) * values[slot]
        if layer.gate is not None and layer.out is not None:
            gate = layer.gate.weight @ token
            total = layer.out.weight @ (gate / (1 + torch.exp(-gate)) * total)
        rows.append(total)
    return torch.stack(rows)


def naive_norm(layer: ProductKeyLayer, raw: Tensor, width: int) -> Tensor:
    norm: Any = layer.norm
    kind = type(norm).__name__
    if kind == "NoNorm":
        return raw
    if kind == "QueryBatchNorm":
        if layer.training:
            mean, variance = raw.mean(0), (raw - raw.mean(0)).square().mean(0)
        else:
            mean, variance = norm.running_mean, norm.running_var
        return (raw - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
    rows = []
    for token in raw:
        pieces = []
        for query in token.split(width):
            spread = (query - query.mean()).square().mean()
            pieces.append((query - query.mean()) / (spread + norm.eps).sqrt() * norm.weight + norm.bias)
        rows.append(torch.cat(pieces))
    return torch.stack(rows)


def made(norm: str = "batch", k: int = K, slots: int = SLOTS, **options: bool) -> tuple[ProductKeyLayer, ValueTable]:
    """A layer and its table in float64, with nothing at 0 or 1 that training would move."""
    torch.manual_seed(0)
    layer = ProductKeyLayer(WIDTH, slots, HEADS, k, KEY_DIM, norm=norm, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        for name, tensor in layer.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return layer, ValueTable(slots, WIDTH).double()


def gradients(output: Tensor, x: Tensor, layer: ProductKeyLayer, table: ValueTable) -> dict[str, Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    x.grad = None
    for module in (layer, table):
        module.zero_grad()
    (output * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return found | {"x": x.grad, "values": table.weight.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("options", [{}, {"cosine": True}, {"gated": True}, {"cosine": True, "gated": True}], ids=str)
def test_the_layer_and_all_its_gradients_are_the_formulas(options: dict[str, bool], norm: str, training: bool) -> None:
    layer, table = made(norm, **options)
    layer.train(training)
    x = torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = naive(layer, table.weight, x)
    wanted = gradients(expected, x, layer, table)
    for select in (best_pairs, quick_best_pairs):
        layer.select = select
        got = layer(x, table)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        ours = gradients(got, x, layer, table)
        assert ours.keys() == wanted.keys()
        for name, gradient in ours.items():
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            torch.testing.assert_close(dense, wanted[name], rtol=1e-8, atol=1e-11, msg=name)
            # before batch statistics a bias of the queries changes nothing
            nothing = name == "query.bias" and norm == "batch" and training
            assert (dense.abs().max() > 1e-6) != nothing, name


def test_reading_every_slot_is_a_softmax_over_the_table() -> None:
    layer, table = made("none", k=SLOTS)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    queries = layer.query(x).view(5, HEADS, 2, KEY_DIM // 2)
    first, second = (torch.einsum("nhd,hcd->nhc", queries[:, :, half], layer.keys[:, half]) for half in (0, 1))
    shares = (first[..., None] + second[..., None, :]).flatten(-2).softmax(-1).sum(1)
    torch.testing.assert_close(layer(x, table), shares @ table.weight)


def test_the_gradient_of_values_has_exactly_the_rows_that_were_read() -> None:
    layer, table = made()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    slots, weights = layer.find(x)
    assert slots.shape == weights.shape == (3, HEADS, K)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, HEADS).double())
    layer(x, table).sum().backward()
    gradient = table.weight.grad
    assert gradient.is_sparse
    assert gradient._indices().tolist() == [slots.unique().tolist()]  # each once and in order
    torch.testing.assert_close(gradient.coalesce().values(), gradient._values(), rtol=0, atol=0)
    table(torch.tensor([[[24]]]), torch.ones(1, 1, 1).double()).sum().backward()  # added to what is there
    assert set(table.weight.grad.coalesce().indices()[0].tolist()) == {24, *slots.unique().tolist()}


@pytest.mark.parametrize("reads", [1, 40])
def test_the_table_is_a_weighted_embedding_bag(reads: int) -> None:
    """More tokens than are multiplied at once, the same slot many times in one token, some never."""
    torch.manual_seed(1)
    table = ValueTable(9, 5).double()
    slots = torch.randint(0, 7, (37, 2, reads))
    weights = torch.randn(37, 2, reads, dtype=torch.float64, requires_grad=True)
    out = torch.randn(37, 5, dtype=torch.float64)
    found = []
    for naively in (False, True):
        table.zero_grad()
        weights.grad = None
        result = (weights[..., None] * table.weight[slots]).sum((1, 2)) if naively else table(slots, weights)
        (result * out).sum().backward()
        found.append([result.detach(), table.weight.grad.to_dense(), weights.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_that_shall_not_learn_have_no_gradient() -> None:
    layer, table = made()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    layer(x, table).square().sum().backward()
    everything, keys = table.weight.grad.coalesce(), layer.keys.grad.clone()
    table.learning = torch.arange(SLOTS) % 2 == 0
    for module in (layer, table):
        module.zero_grad()
    layer(x, table).square().sum().backward()
    rows = table.weight.grad.coalesce().indices()[0]
    assert rows.tolist() == [row for row in everything.indices()[0].tolist() if row % 2 == 0]
    torch.testing.assert_close(table.weight.grad.to_dense()[rows], everything.to_dense()[rows])
    torch.testing.assert_close(layer.keys.grad, keys)


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_no_tokens_at_all(norm: str, training: bool) -> None:
    layer, table = made(norm, gated=True)
    before = [tensor.clone() for tensor in layer.buffers()]
    layer.train(training)
    result = layer(torch.empty(0, WIDTH, dtype=torch.float64), table)
    assert result.shape == (0, WIDTH)
    result.sum().backward()
    assert table.weight.grad._nnz() == 0
    assert all(torch.equal(one, other) for one, other in zip(before, layer.buffers(), strict=True))


def test_one_token_in_training_is_normalised_by_what_was_seen() -> None:
    layer, table = made("batch")
    x = torch.randn(1, WIDTH, dtype=torch.float64)
    before = [tensor.clone() for tensor in layer.buffers()]
    in_training = layer.train()(x, table)
    assert all(torch.equal(one, other) for one, other in zip(before, layer.buffers(), strict=True))
    torch.testing.assert_close(in_training, layer.eval()(x, table))


def test_values_begin_as_in_the_paper_or_at_zero() -> None:
    torch.manual_seed(0)
    assert ValueTable(2000, 16).weight.std().item() == pytest.approx(16**-0.5, rel=0.03)
    assert not ValueTable(9, 4, zeros=True).weight.any()
    assert ValueTable(9, 4, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert ProductKeyLayer(8, 16, 1, 2, 64).keys.abs().max() <= 1 / math.sqrt(64)


def test_a_narrow_table_reads_and_learns_what_a_wide_one_does() -> None:
    layer, table = made()
    narrow = ValueTable(SLOTS, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        narrow.weight.copy_(table.weight)
        table.weight.copy_(narrow.weight)
    x = torch.randn(20, WIDTH, dtype=torch.float64)
    results = []
    for one in (table, narrow):
        layer.zero_grad()
        result = layer(x, one)
        assert result.dtype == torch.float64
        result.square().sum().backward()
        results.append([result, one.weight.grad.to_dense().double(), layer.keys.grad])
    assert narrow.weight.grad.dtype == torch.bfloat16
    for wide, other in zip(*results, strict=True):
        torch.testing.assert_close(other, wide, rtol=0.05, atol=0.03 * wide.abs().max().item())
