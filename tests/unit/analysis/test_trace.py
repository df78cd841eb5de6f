"""A trace says what was retrieved for each token, with which weight, and what it was worth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mnemic
from mnemic.analysis.trace import Trace
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.errors import UsageError
from mnemic.hf.losses import token_losses
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

TEXT = "the treaty of the two rivers was signed by Ansgar the Elder in a tent of red felt. " * 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([], "byte")


def make(tokenizer: Any, xl_length: int = 0, **memory: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "position": "rotary"}
    model = MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=len(tokenizer), xl_length=xl_length, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return mnemic.augment(model, mnemic.KNNAttention(**{"layers": [0, 2], "k": 4, "size": 500, **memory})).eval()


@pytest.mark.parametrize("xl_length", [0, 16])
@pytest.mark.parametrize("mix", ["gate", "joint"])
def test_a_trace_is_what_evaluation_measures(tokenizer: Any, xl_length: int, mix: str) -> None:
    model = make(tokenizer, xl_length, mix=mix)
    found = mnemic.trace(model, tokenizer, TEXT, window=32, smaller=0)
    corpus = Corpus("one", {"test": lambda: [Document("text", TEXT)]})
    measured = mnemic.evaluate(model, tokenizer, corpus, split="test", window=32)
    assert found.losses.sum().item() == pytest.approx(measured["nll"], rel=1e-5)
    model.memory.attention.config.size = 0
    without = mnemic.evaluate(model, tokenizer, corpus, split="test", window=32)
    assert found.gains.sum().item() == pytest.approx(without["nll"] - measured["nll"], rel=1e-3, abs=1e-3)

    length = len(tokenizer(TEXT).input_ids) + 2  # what begins and ends a document
    assert found.ids.shape == found.losses.shape == (length,)
    assert found.numbers.shape == found.weights.shape == (2, 4, length, 4)
    assert found.shares.shape == (2, 4, length)
    for t in range(1, length):
        segment = (t - 1) // 32 * 32  # the prediction of token t is made at token t - 1
        visible = max(segment - xl_length, 0)
        numbers = found.numbers[:, :, t]
        assert (numbers < visible).all()
        assert (numbers >= 0).all() == (visible >= 4)
        torch.testing.assert_close(found.weights[:, :, t].sum(-1), torch.full((2, 4), float(visible > 0)))
        assert (found.shares[:, :, t] > 0).all() == (visible > 0)
    assert (found.gains[1:33] == 0).all()
    assert found.distances().min() >= 2


def test_a_trace_tells_what_each_window_found_for_the_tokens_it_scores(tokenizer: Any) -> None:
    """The last window begins with tokens that were scored before; what is found for them is not shown."""
    model = make(tokenizer, layers=[0])
    found = mnemic.trace(model, tokenizer, TEXT, window=32)
    inputs = len(found.ids) - 1
    assert inputs % 32  # so that windows overlap
    (memory,) = (state := model.memory.new_state(1))["attention"].memories.values()
    for begin in (*range(0, inputs - 31, 32), inputs - 32):
        ids, scored = found.ids[None, begin : begin + 33], -begin % 32
        targets = ids[:, 1:].clone()
        targets[:, :scored] = -100
        with torch.no_grad(), model.memory.attention.observing() as seen:
            token_losses(model.eval(), targets, input_ids=ids[:, :-1], memory_state=state, use_cache=False)
        for name, own in (("numbers", found.numbers), ("weights", found.weights), ("shares", found.shares)):
            torch.testing.assert_close(own[:, :, begin + scored + 1 : begin + 33], seen[0][name][:, :, scored:])
    assert memory.rows[0].count == inputs


def test_the_best_tokens_are_shown_with_what_was_retrieved(tokenizer: Any, tmp_path: Path) -> None:
    found = mnemic.trace(make(tokenizer), tokenizer, Document("a", TEXT), window=32, smaller=40)
    rows = found.best(3)
    assert [row["gain"] for row in rows] == sorted(found.gains.tolist(), reverse=True)[:3]
    for row in rows:
        assert row["target"] == found.text(row["token"], row["token"] + 1)
        assert TEXT.find(row["query"].split("<")[-1][-8:]) >= 0
        shown = found.retrieved(row["token"])
        assert [one["weight"] for one in row["retrieved"]] == [one.weight for one in shown]
        usual = [found.usual_looks[found.layers.index(one.layer), one.head, one.position] for one in shown]
        unusual = [one.weight * math.log(one.weight / mean) for one, mean in zip(shown, usual, strict=True)]
        assert unusual == sorted(unusual, reverse=True)
        for one in row["retrieved"]:
            assert one["distance"] == row["token"] - one["position"] > 0
    for what in ("loss-delta", "distance", "shares"):
        found.plot(what, tmp_path / f"{what}.svg")
        assert (tmp_path / f"{what}.svg").read_text().startswith("<?xml")
    with pytest.raises(UsageError, match="loss-delta, distance and shares"):
        found.plot("nothing", tmp_path / "x.svg")


def test_what_cannot_be_traced(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="give the model one"):
        mnemic.trace(make(tokenizer).memory.detach(), tokenizer, TEXT)
    with pytest.raises(UsageError, match="dense"):
        mnemic.trace(make(tokenizer, dense=True), tokenizer, TEXT)
    with pytest.raises(UsageError, match="smaller=0"):
        mnemic.trace(make(tokenizer), tokenizer, TEXT, window=32).gains  # noqa: B018


def test_what_a_head_always_looks_at_is_not_shown_first(tokenizer: Any) -> None:
    """A head that rests on token 0, and once looks at token 3."""
    numbers = torch.zeros(1, 1, 10, 2, dtype=torch.long)
    numbers[..., 1] = 3
    weights = torch.tensor([0.9, 0.1]).expand(1, 1, 10, 2).clone()
    weights[0, 0, 7] = torch.tensor([0.6, 0.4])
    weights[0, 0, 0], numbers[0, 0, 0] = 0, -1
    losses = torch.zeros(10)
    found = Trace(tokenizer, torch.arange(10), losses, None, [4], numbers, weights, torch.full((1, 1, 10), 0.5))
    torch.testing.assert_close(found.usual_looks[0, 0, [0, 3, 5]], torch.tensor([0.39, 0.06, 0.0]))
    assert [(one.position, round(one.weight, 6)) for one in found.retrieved(7)] == [(3, 0.2), (0, 0.3)]
    assert [one.position for one in found.retrieved(6, most=1)] == [0]
    assert found.retrieved(0) == []
