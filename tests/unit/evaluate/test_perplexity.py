"""Perplexity against a loop that scores one token at a time in double precision."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mnemic
from mnemic.data import Document
from mnemic.data.documents import Corpus
from mnemic.errors import MnemicError, UsageError
from mnemic.evaluate.config import EvaluateConfig

UNICODE = ["Grüße aus der Straße", "x", "one two  three\nfour", "日本語 text", "the end of all the things we know"]


def make_corpus(texts: list[str]) -> Corpus:
    return Corpus("given", {"valid": lambda: [Document(str(n), text) for n, text in enumerate(texts)]})


def ids(tokenizer: Any, text: str) -> list[int]:
    return [tokenizer.eos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def some_texts(longest: int, most: int) -> st.SearchStrategy[list[str]]:
    text = st.text(st.sampled_from("abcd é\n"), min_size=1, max_size=longest).filter(str.strip)
    return st.lists(text, min_size=1, max_size=most)


def naive_windows(model: Any, tokenizer: Any, texts: list[str], window: int, stride: int) -> float:
    """Each token by itself: where its window begins follows from how far windows have moved when it is reached."""
    total = 0.0
    for text in texts:
        tokens = ids(tokenizer, text)
        inputs = len(tokens) - 1
        for place in range(inputs):
            end = window
            while end <= place:
                end += stride
            end = min(end, inputs)
            start = max(0, end - window)
            logits = model(torch.tensor([tokens[start : place + 1]])).logits[0, -1].double()
            total -= logits.log_softmax(-1)[tokens[place + 1]].item()
    return total


def naive_carried(model: Any, tokenizer: Any, texts: list[str], window: int) -> float:
    """Each document by itself, segment by segment, with a cache of its own."""
    total = 0.0
    for text in texts:
        tokens = ids(tokenizer, text)
        cache = model.new_cache(1)
        for start in range(0, len(tokens) - 1, window):
            piece = tokens[start : min(start + window, len(tokens) - 1)]
            logits = model(torch.tensor([piece]), past_key_values=cache, use_cache=True).logits[0].double()
            for place, scores in enumerate(logits.log_softmax(-1)):
                total -= scores[tokens[start + place + 1]].item()
    return total


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=some_texts(longest=20, most=4),
    window=st.integers(1, 12),
    stride=st.integers(1, 12),
    batch_size=st.integers(1, 5),
)
@torch.no_grad()
def test_windows_score_each_token_once(texts, window, stride, batch_size, tokenizer, make_model):
    model, stride = make_model("gpt2").double().eval(), min(stride, window)
    got = mnemic.evaluate(model, tokenizer, make_corpus(texts), window=window, stride=stride, batch_size=batch_size)
    assert got["tokens"] == sum(len(ids(tokenizer, text)) - 1 for text in texts)
    assert got["nll"] == pytest.approx(naive_windows(model, tokenizer, texts, window, stride), rel=1e-6)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=some_texts(longest=30, most=5),
    window=st.integers(1, 12),
    batch_size=st.integers(1, 4),
    position=st.sampled_from(["t5", "xl", "rotary", "sinusoidal"]),
)
@torch.no_grad()
def test_a_model_with_an_xl_cache_reads_on_with_its_cache(texts, window, batch_size, position, tokenizer, make_model):
    model = make_model("decoder", position=position, xl_length=7).double().eval()
    got = mnemic.evaluate(model, tokenizer, make_corpus(texts), window=window, batch_size=batch_size)
    assert got["tokens"] == sum(len(ids(tokenizer, text)) - 1 for text in texts)
    assert got["nll"] == pytest.approx(naive_carried(model, tokenizer, texts, window), rel=1e-6)


@pytest.mark.parametrize("kind", ["decoder", "gpt2"])
def test_the_batch_size_does_not_matter(kind, corpus, tokenizer, make_model):
    model = make_model(kind)
    results = [
        mnemic.evaluate(model, tokenizer, corpus, split="train", window=9, batch_size=size)["nll"]
        for size in (1, 2, 3, 7, 50)
    ]
    assert results == pytest.approx([results[0]] * 5, rel=1e-6)


def test_the_cache_is_used(tokenizer, make_model):
    """Or the test above would hold for a model that forgets."""
    texts = ["a text that is longer than the window, so that there is something to remember"]
    model = make_model("decoder", xl_length=40)
    with_cache = mnemic.evaluate(model, tokenizer, make_corpus(texts), window=8)["nll"]
    model.config.xl_length = 0
    without = mnemic.evaluate(model, tokenizer, make_corpus(texts), window=8)["nll"]
    assert abs(with_cache - without) > 1e-4


def test_units(tokenizer, make_model):
    got = mnemic.evaluate(make_model("gpt2"), tokenizer, make_corpus(UNICODE), window=16)
    assert got["bytes"] == sum(len(text.encode()) for text in UNICODE)
    assert got["characters"] == sum(map(len, UNICODE)) < got["bytes"]
    assert got["words"] == sum(len(text.split()) for text in UNICODE)
    assert got["documents"] == 5
    nll = got["nll"]
    assert got["perplexity"] == pytest.approx(math.exp(nll / got["tokens"]))
    assert got["word_perplexity"] == pytest.approx(math.exp(nll / got["words"]))
    assert got["byte_perplexity"] == pytest.approx(math.exp(nll / got["bytes"]))
    assert got["bits_per_byte"] == pytest.approx(math.log2(got["byte_perplexity"]))
    assert got["bits_per_character"] == pytest.approx(nll / math.log(2) / got["characters"])


def test_the_result_is_json_and_says_what_made_it(tokenizer, make_model):
    got = mnemic.evaluate(make_model("gpt2"), tokenizer, make_corpus(UNICODE), EvaluateConfig(window=16, stride=4))
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    assert (got["model"], got["corpus"], got["window"], got["stride"]) == ("GPT2LMHeadModel", "given", 16, 4)
    assert got["versions"]["torch"] == torch.__version__


def test_a_text_without_spaces_has_no_word_perplexity(tokenizer, make_model):
    got = mnemic.evaluate(make_model("gpt2"), tokenizer, make_corpus(["x" * 300]), window=16)
    assert got["words"] == 1
    assert got["word_perplexity"] is None
    json.dumps(got, allow_nan=False)


def test_limits_take_whole_documents(tokenizer, make_model):
    model, corpus = make_model("gpt2"), make_corpus(UNICODE)
    first = mnemic.evaluate(model, tokenizer, corpus, max_documents=2, window=16)
    assert (first["documents"], first["tokens"]) == (2, sum(len(ids(tokenizer, t)) - 1 for t in UNICODE[:2]))
    for most in (1, first["tokens"] - 1, first["tokens"], first["tokens"] + 1):
        got = mnemic.evaluate(model, tokenizer, corpus, max_tokens=most, window=16)
        sizes = [len(ids(tokenizer, text)) - 1 for text in UNICODE]
        expected = next(n for n in range(1, 6) if sum(sizes[:n]) >= most)
        assert got["documents"] == expected
        assert got["characters"] == sum(map(len, UNICODE[:expected]))


@pytest.mark.parametrize("kind", ["decoder", "gpt2"])
def test_it_leaves_no_trace(kind, corpus, tokenizer, make_model):
    model = make_model(kind).train()
    model.get_input_embeddings().eval()  # a mixture of modes, as with a frozen part
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    first = mnemic.evaluate(model, tokenizer, corpus, window=16)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert mnemic.evaluate(model, tokenizer, corpus, window=16) == first  # no dropout, nothing left in a cache


def test_modes_come_back_after_an_error(corpus, tokenizer, make_model):
    model = make_model("gpt2").train()
    with pytest.raises(UsageError):
        mnemic.evaluate(model, tokenizer, corpus, window=33)
    assert model.training


def test_what_cannot_be_measured_is_refused(corpus, tokenizer, make_model):
    with pytest.raises(UsageError, match="window = 33, but GPT2LMHeadModel has 32 positions"):
        mnemic.evaluate(make_model("gpt2"), tokenizer, corpus, window=33)
    with pytest.raises(UsageError, match="leave stride unset"):
        mnemic.evaluate(make_model(), tokenizer, corpus, window=8, stride=4)
    with pytest.raises(UsageError, match=r"metrics = \['masked_loss'\]"):
        mnemic.evaluate(make_model("bert"), tokenizer, corpus, metrics=["perplexity"])
    with pytest.raises(UsageError, match="not both"):
        mnemic.evaluate(make_model(), tokenizer, corpus, EvaluateConfig(), window=8)
    with pytest.raises(UsageError, match="did you mean 'window'"):
        mnemic.evaluate(make_model(), tokenizer, corpus, windw=8)
    broken = make_model("gpt2")
    broken.transformer.wte.weight.data[:] = float("nan")
    with pytest.raises(MnemicError, match="the loss is nan"):
        mnemic.evaluate(broken, tokenizer, corpus, window=8)


def test_masked_loss_depends_on_the_seed_and_not_on_the_batch_size(corpus, tokenizer, make_model):
    model = make_model("bert")

    def measure(**options: Any) -> dict[str, Any]:
        return mnemic.evaluate(model, tokenizer, corpus, metrics=["masked_loss"], split="train", window=12, **options)

    results = [measure(batch_size=size) for size in (1, 3, 50)]
    assert len({result["masked_tokens"] for result in results}) == 1
    assert results[0]["masked_tokens"] > 0
    losses = [result["masked_loss"] for result in results]
    usual = mnemic.evaluate(model, tokenizer, corpus, split="train", window=12)
    assert usual["masked_loss"] == pytest.approx(losses[0], rel=1e-6)
    assert usual["metrics"] == ["masked_loss"]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert measure(seed=1)["masked_loss"] != losses[0]
    with pytest.raises(UsageError, match="'masked' is for masked models"):
        mnemic.evaluate(make_model("gpt2"), tokenizer, corpus, metrics=["masked_loss"])
