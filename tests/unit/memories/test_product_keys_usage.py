"""How much of a memory is used: figures worked out by hand, and what is counted in models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mnemic
from mnemic.memories.product_keys.usage import Counts, Usage, from_uniform
from tests.contract.architectures import VOCABULARY, build

SLOTS, HEADS, K = 16, 2, 3


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def model_with(architecture: str = "bert", **settings: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"layers": [0, 1], "slots": SLOTS, "heads": HEADS, "k": K, "key_dim": 8}
    return mnemic.augment(build(architecture), mnemic.ProductKeys(**sizes | settings)).eval()


def test_even_use() -> None:
    counts = Counts.zeros(1, 4)
    counts.add(
        torch.tensor([[[0, 1]], [[1, 0]], [[2, 3]], [[3, 2]]]), torch.full((4, 1, 2), 0.5) + torch.tensor([0.1, -0.1])
    )
    got = counts.figures()
    assert got == {
        "usage": 1.0,
        "top1_usage": 1.0,
        "kl_reads": pytest.approx(0, abs=1e-12),
        "kl_weights": pytest.approx(0, abs=1e-7),
        "reads": 8,
    }


def test_one_slot_only() -> None:
    counts = Counts.zeros(2, 9)
    counts.add(torch.full((5, 2, 1), 7), torch.ones(5, 2, 1))
    log = pytest.approx(math.log(9))
    assert counts.figures() == {"usage": 1 / 9, "top1_usage": 1 / 9, "kl_reads": log, "kl_weights": log, "reads": 10}
    assert counts.by_head() == [counts.figures() | {"reads": 5}] * 2


def test_an_example_worked_out_by_hand() -> None:
    """Two tokens, two heads, k = 2, four slots; the best does not stand first."""
    slots = torch.tensor([[[0, 1], [1, 2]], [[0, 2], [1, 0]]])
    weights = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[1.0, 0.0], [0.875, 0.125]]])
    counts = Counts.zeros(2, 4)
    counts.add(slots[:1], weights[:1])
    counts.add(slots[1:], weights[1:])
    assert counts.reads.tolist() == [[2, 1, 1, 0], [1, 2, 1, 0]]
    assert counts.weights.tolist() == [[1.25, 0.75, 0, 0], [0.125, 1.375, 0.5, 0]]
    assert counts.tops[0].tolist() == [1, 1, 0, 0]
    assert counts.tops[1].tolist() in ([0, 2, 0, 0], [0, 1, 1, 0])  # of two equal ones, one

    def divergence(*shares: float) -> Any:
        return pytest.approx(math.log(4) + sum(share * math.log(share) for share in shares if share))

    whole = counts.figures()
    assert (whole["usage"], whole["reads"]) == (0.75, 8)
    assert whole["kl_reads"] == divergence(3 / 8, 3 / 8, 2 / 8)
    assert whole["kl_weights"] == divergence(1.375 / 4, 2.125 / 4, 0.5 / 4)
    first, second = counts.by_head()
    assert (first["usage"], first["top1_usage"], first["reads"]) == (0.75, 0.5, 4)
    assert first["kl_reads"] == divergence(2 / 4, 1 / 4, 1 / 4)
    assert first["kl_weights"] == divergence(1.25 / 2, 0.75 / 2)
    assert second["kl_weights"] == divergence(0.125 / 2, 1.375 / 2, 0.5 / 2)


def test_nothing_read_yet() -> None:
    nothing = {"usage": 0.0, "top1_usage": 0.0, "kl_reads": 0.0, "kl_weights": 0.0, "reads": 0}
    assert Usage([3, 5], 2, 9).figures() == {3: nothing, 5: nothing}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_the_divergence_is_its_definition(numbers: list[int]) -> None:
    total = sum(numbers)
    expected = sum(n / total * math.log(n / total * len(numbers)) for n in numbers if n) if total else 0.0
    assert from_uniform(torch.tensor(numbers)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@torch.no_grad()
def test_what_a_model_reads_is_counted_by_layer_and_head(architecture: str) -> None:
    model, ids = model_with(architecture), tokens(2, 7)
    handle, found = model.memory.product_keys, {}
    for number, layer in handle.layers.items():
        find = layer.find
        layer.find = lambda x, find=find, number=number: found.setdefault(int(number), find(x))
    with handle.counting() as usage:
        model(ids)
    for number, (slots, weights) in found.items():
        counts = usage.layers[number]
        for head in range(HEADS):
            for slot in range(SLOTS):
                here = slots[:, head] == slot
                assert counts.reads[head, slot] == here.sum()
                assert counts.weights[head, slot].item() == pytest.approx(weights[:, head][here].sum().item(), abs=1e-5)
        best = slots.gather(-1, weights.argmax(-1, keepdim=True))[..., 0]
        assert torch.equal(counts.tops, torch.stack([best[:, head].bincount(minlength=SLOTS) for head in range(HEADS)]))
        # softmaxed weights: those of each token and head add up to 1
        torch.testing.assert_close(counts.weights.sum(1), torch.full((HEADS,), 14.0).double(), rtol=1e-5, atol=0)
    assert usage.figures()[0] != usage.figures()[1]


@torch.no_grad()
def test_counting_begins_and_ends_with_its_context() -> None:
    model, one = model_with(), 7 * HEADS * K
    handle = model.memory.product_keys
    model(tokens(1, 7))
    with handle.counting() as outer:
        model(tokens(1, 7))
        with handle.counting() as inner:
            model(tokens(1, 7, seed=1))
        with model.memory.disabled():
            model(tokens(1, 7))
        assert inner.figures()[1]["reads"] == one
        with pytest.raises(RuntimeError, match="stop"), handle.counting() as failed:
            raise RuntimeError("stop")
        model(tokens(1, 7))
    model(tokens(1, 7))
    assert [usage.figures()[0]["reads"] for usage in (outer, inner, failed)] == [3 * one, one, 0]


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama", "bart"])
@torch.no_grad()
def test_padding_is_not_counted(architecture: str) -> None:
    model = model_with(architecture)
    ids, mask = tokens(3, 8), torch.ones(3, 8, dtype=torch.long)
    mask[0, 5:] = mask[2, :4] = 0
    more = {"decoder_input_ids": tokens(3, 2)} if architecture == "bart" else {}
    counted = []
    for padding in (ids, tokens(3, 8, seed=9)):
        with model.memory.product_keys.counting() as usage:
            model(input_ids=torch.where(mask.bool(), ids, padding), attention_mask=mask, **more)
        counted.append(usage)
    for number in (0, 1):
        one, other = (usage.layers[number] for usage in counted)
        assert one.figures()["reads"] == mask.sum() * HEADS * K
        assert torch.equal(one.reads, other.reads)


@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_generating_counts_each_token_once(left: bool) -> None:
    model = model_with("gpt2")
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    if left:
        mask[1, :4] = 0
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with model.memory.product_keys.counting() as usage:
        model.generate(input_ids=ids, attention_mask=mask, **how)
    assert usage.figures()[0]["reads"] == (mask.sum() + 2 * 4) * HEADS * K
