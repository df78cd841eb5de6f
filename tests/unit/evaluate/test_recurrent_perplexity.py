"""Perplexity with recurrent memory tokens: each document as if it were read alone, each token once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mnemic
from mnemic.data import Document
from mnemic.data.documents import Corpus
from tests.contract.architectures import build

WINDOW = 7
TEXTS = [
    "one two three four five six seven",
    "eight",
    "nine ten eleven twelve thirteen fourteen",
    "fifteen and sixteen",
]


@pytest.fixture
def documents() -> Corpus:
    return Corpus("given", {"valid": lambda: [Document(str(n), text) for n, text in enumerate(TEXTS)]})


@pytest.fixture
def made(tokenizer: Any) -> Callable[..., Any]:
    def make(architecture: str, *others: Any) -> Any:
        """A model in which a memory that is another's, or begins anew, changes each loss that follows."""
        name, _, xl = architecture.partition("+")
        model = build(name).double()
        if xl:
            model.config.xl_length = 5
        model.resize_token_embeddings(len(tokenizer))
        model = mnemic.augment(model, mnemic.MemoryTokens.recurrent(count=3, segment=WINDOW), *others).double().eval()
        draw = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(0.25 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        return model

    return make


@torch.no_grad()
def alone(model: Any, tokenizer: Any, text: str) -> list[torch.Tensor]:
    """The losses of a document, each segment with what was written behind the one before."""
    end = tokenizer.eos_token_id
    tokens = torch.tensor([[end, *tokenizer(text)["input_ids"], end]])
    states, losses = model.memory.new_state(1), []
    given: dict[str, Any] = {"memory_state": states}
    if model.memory.xl_length:
        given |= {"past_key_values": model.memory.new_cache(1), "use_cache": True}
    for begin in range(0, tokens.shape[1] - 1, WINDOW):
        pieces = tokens[:, begin : begin + WINDOW + 1]
        losses.append(model.token_losses(pieces[:, 1:], input_ids=pieces[:, :-1], **given)[0].flatten())
    return losses


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom", "mnemic-xl+xl"])
def test_documents_are_read_segment_by_segment_as_if_each_were_alone(
    architecture: str, batch_size: int, documents, made, tokenizer
) -> None:
    model = made(architecture)  # of two rows the first ends first: 6 and 1 segments beside 5 and 3
    expected = torch.cat([losses for text in TEXTS for losses in alone(model, tokenizer, text)])
    found = mnemic.evaluate(model, tokenizer, documents, batch_size=batch_size)
    assert found["tokens"] == len(expected)
    assert found["nll"] == pytest.approx(expected.sum().item(), rel=1e-9)


def test_the_memory_is_what_tells_one_order_of_segments_from_another(made, tokenizer) -> None:
    """Or the test above would hold for a model that forgets."""
    model = made("llama")
    first, second = (alone(model, tokenizer, text) for text in ("abcdefg hijklm", "gfedcba hijklm"))
    assert (first[1] - second[1]).abs().min() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("stride", [3, WINDOW])
def test_only_a_smaller_stride_reads_tokens_twice(stride: int, documents, made, tokenizer) -> None:
    model, end, expected = made("llama"), tokenizer.eos_token_id, 0.0
    for text in TEXTS:
        tokens, states = torch.tensor([[end, *tokenizer(text)["input_ids"], end]]), model.memory.new_state(1)
        scored, stop = 0, min(WINDOW, tokens.shape[1] - 1)
        while scored < tokens.shape[1] - 1:
            start = max(0, stop - WINDOW) if stride < WINDOW else scored
            given = {"input_ids": tokens[:, start:stop], "memory_state": states}
            expected += (
                model.token_losses(tokens[:, start + 1 : stop + 1], **given)[0][0, scored - start :].sum().item()
            )
            scored, stop = stop, min(stop + stride, tokens.shape[1] - 1)
    found = mnemic.evaluate(model, tokenizer, documents, stride=stride)
    assert found["nll"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("architecture", ["llama", "bloom", "mnemic-xl+xl"])
def test_without_its_tokens_a_model_is_measured_as_its_base(architecture: str, documents, made, tokenizer) -> None:
    model, found = made(architecture), []
    with model.memory.disabled():
        found.append(mnemic.evaluate(model, tokenizer, documents, batch_size=2)["nll"])
    model.memory.change("tokens", count=0)
    found.append(mnemic.evaluate(model, tokenizer, documents, batch_size=2)["nll"])
    base = mnemic.evaluate(model.memory.detach(), tokenizer, documents, batch_size=2, window=WINDOW)["nll"]
    assert found == pytest.approx([base, base], rel=1e-9)


def test_an_attention_memory_beside_them_keeps_each_token_once(documents, made, tokenizer) -> None:
    model = made("llama", mnemic.KNNAttention(layers=[1], k=4, size=100))
    expected = torch.cat([losses for text in TEXTS for losses in alone(model, tokenizer, text)])
    found = mnemic.evaluate(model, tokenizer, documents, batch_size=2)["nll"]
    assert found == pytest.approx(expected.sum().item(), rel=1e-9)
