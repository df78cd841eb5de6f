"""A memory that a pretrained model looks into as into its context: scores, distances, and what it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.memories.attention.reading import Forward
from tests.contract.architectures import VOCABULARY, build
from tests.unit.memories.test_attention import tokens

PLAIN = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_neox", "opt", "phi", "olmo2"]
PLAIN += ["mnemic-rotary", "mnemic-sinusoidal"]
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def llama(layers: int = 1, rope: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 1000.0},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.4)
    return model.double().eval()


@pytest.mark.parametrize("rope", [None, YARN], ids=["usual", "scaled"])
@pytest.mark.parametrize("distance", [0, 1, 40])
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_what_is_remembered_is_as_context_at_a_distance(rope: dict[str, Any] | None, distance: int, sinks: int) -> None:
    """In one layer keys and values depend on no context: the model itself can read the same at those positions."""
    model, text, last = llama(rope=rope), tokens(1, 9), tokens(1, 1, seed=1)
    together = torch.cat([text[:, sinks:], last], 1)
    places = torch.tensor([[*[0] * (9 - sinks), distance]])
    with torch.no_grad():
        expected = model(together, attention_mask=torch.ones_like(together), position_ids=places).logits[:, -1]
        memory = mnemic.KNNAttention.as_context(layers=[0], k=20, size=20, distance=distance, sinks=sinks)
        mnemic.augment(model, memory)
        model.memory.double().read(text)
        got = model(last).logits[:, -1]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # the memory keeps float32


@pytest.mark.parametrize("architecture", PLAIN)
def test_scores_of_the_memory_are_those_of_the_context(architecture: str) -> None:
    """A token that is remembered too, at no distance, has half of what a token has that is alone with itself."""
    model = build(architecture).eval()
    memory = mnemic.KNNAttention.as_context(layers=[1], k=4, size=20, distance=0, sinks=0)
    one = tokens(1, 1)
    with torch.no_grad():
        before = model(one).logits
        mnemic.augment(model, memory)
        model.memory.read(one)
        with model.memory.attention.observing() as seen:
            after = model(one).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)  # both are the same value
    torch.testing.assert_close(seen[0]["shares"], torch.full_like(seen[0]["shares"], 0.5), rtol=1e-4, atol=1e-4)


def naive_kept(
    real: Tensor, starts: Tensor | None, overlap: Tensor | None, follows: bool, sinks: int
) -> tuple[list[list[bool]], list[bool]]:
    """Token by token: how many real ones there are since the context or the document began."""
    kept, begun = [], []
    for row in range(len(real)):
        own: list[bool] = []
        seen, began = (sinks if follows else 0), False
        for t in range(real.shape[1]):
            new = bool(real[row, t]) and (overlap is None or t >= overlap[row])
            if starts is not None and starts[row, t] and new:
                own, seen, began = [False] * len(own), 0, True
            own.append(new and seen >= sinks)
            seen += bool(real[row, t])
        kept.append(own)
        begun.append(began)
    return kept, begun


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_first_tokens_of_contexts_are_passed_over(follows: bool, sinks: int, prefix: int) -> None:
    draw = torch.Generator().manual_seed(sinks)
    for trial in range(200):
        rows, length = 3, 1 + trial % 9
        real = torch.rand(rows, length, generator=draw) < (1.0 if trial % 2 else 0.7)
        starts = torch.rand(rows, length, generator=draw) < 0.15 if trial % 3 else None
        overlap = torch.randint(0, length + 1, (rows,), generator=draw) if trial % 5 == 0 else None
        call = Forward(None, starts=starts, real=real, overlap=overlap, sinks=sinks, follows=follows, prefix=prefix)
        call.new[0] = torch.zeros(rows, 1, prefix + length, 4), torch.zeros(rows, 1, prefix + length, 4)
        kept, begun = call._kept()
        expected = naive_kept(real, starts, overlap, follows, sinks)
        assert (kept.tolist(), begun.tolist()) == expected


def test_an_xl_cache_has_one_first_token_a_document() -> None:
    model = mnemic.augment(
        llama(layers=2), mnemic.KNNAttention.as_context(layers=[0, 1], k=4, size=50, xl_length=4, sinks=1)
    )
    cache, text = model.memory.new_cache(1), tokens(1, 21)
    with torch.no_grad():
        for piece in text.split(5, 1):
            model(piece, past_key_values=cache, use_cache=True)
    (state,) = cache.riders
    assert [memory.rows[0].count for memory in state.memories.values()] == [20, 20]


def test_a_trace_names_the_places_of_what_is_kept() -> None:
    tokenizer = train_tokenizer([], "byte")
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    memory = mnemic.KNNAttention.as_context(layers=[1], k=100, size=100, sinks=1)
    model = mnemic.augment(LlamaForCausalLM(settings), memory).eval()
    found = mnemic.trace(model, tokenizer, "a treaty of two rivers, signed in a tent of red felt", window=16)
    inputs = len(found.ids) - 1
    for token in range(1, inputs + 1):
        segment = min((token - 1) // 16 * 16, inputs - 16)  # the last window has tokens that were read before
        numbers = found.numbers[0, 0, token]
        assert sorted(numbers[numbers >= 0].tolist()) == [place for place in range(segment) if place % 16]


def test_first_tokens_of_a_stores_documents_are_passed_over(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], "byte")
    documents = [Document(str(n), "a tent of red felt"[n:]) for n in range(5)]
    corpus = Corpus("tents", {"train": lambda: documents, "valid": list, "test": list})
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = mnemic.augment(
        LlamaForCausalLM(settings), mnemic.KNNAttention.as_context(layers=[1], k=4, size=100, sinks=1)
    )
    store = mnemic.build_store(model, tokenizer, corpus, tmp_path / "s", layer="attention", keys="float32")
    model.memory.change("attention", external=store)
    with torch.no_grad():
        model(tokens(1, 3))
    row = model.memory.attention.stored.memories[1].rows[0]
    assert len(store) - row.count == 5
    firsts = [i for i in range(len(store)) if store.get([i]).references.positions[0] == 0]
    others = torch.from_numpy(store.get([i for i in range(len(store)) if i not in firsts]).keys)
    assert len(firsts) == 5
    torch.testing.assert_close(row.keys.all(0).transpose(0, 1).flatten(1), others[:, : others.shape[1] // 2].float())
    store.close()
