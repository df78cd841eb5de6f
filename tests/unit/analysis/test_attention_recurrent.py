"""Attention maps of recurrent memory tokens: what a segment writes behind itself, and reads of what went before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.analysis.attention import StackMaps
from mnemic.data import train_tokenizer
from tests.contract.architectures import ARCHITECTURES

COUNT, SEGMENT = 3, 8
TEXT = "the treaty was signed"  # 22 bytes with the beginning: two whole segments and a part of one


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([], "byte")


def base(architecture: str, tokenizer: Any) -> Any:
    kind, config = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = kind(type(config).from_dict({**config.to_dict(), "vocab_size": len(tokenizer)}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


def made(architecture: str, tokenizer: Any) -> Any:
    torch.manual_seed(1)
    config = mnemic.MemoryTokens.recurrent(count=COUNT, segment=SEGMENT)
    return mnemic.augment(base(architecture, tokenizer), config)


def by_hand(model: Any, vectors: Tensor, scale: Tensor, tokens: Tensor) -> Tensor:
    """The weights (layers, heads, m + n, m + n) of the last segment: the base reads [memory ; segment ; memory]."""
    memory = vectors
    for segment in tokens.split(SEGMENT):
        length = len(segment)
        around = torch.cat([memory, model.get_input_embeddings()(segment), memory])
        places = torch.cat([torch.arange(-COUNT, 0), torch.arange(length + COUNT)])[None]
        with torch.no_grad():
            outputs = model.base_model(
                inputs_embeds=around[None], position_ids=places, use_cache=False, output_attentions=True
            )
        written = outputs.last_hidden_state[0, -COUNT:]
        memory = vectors + scale * written / written.square().mean(-1, keepdim=True).sqrt()
        weights = torch.cat(outputs.attentions)
    end = COUNT + length
    found = torch.zeros(*weights.shape[:2], end, end)
    for at, row in enumerate([*range(end, end + COUNT), *range(COUNT, end)]):
        for token in range(COUNT):
            found[:, :, at, token] = weights[:, :, row, token] + weights[:, :, row, end + token]
        found[:, :, at, COUNT:] = weights[:, :, row, COUNT:end]
    return found


@pytest.mark.parametrize("architecture", ["llama", "mnemic-rotary"])
@pytest.mark.parametrize("text", [TEXT[:5], TEXT])
def test_maps_are_of_the_last_segment_and_its_memory(architecture: str, text: str, tokenizer: Any) -> None:
    model, plain = made(architecture, tokenizer), base(architecture, tokenizer)
    plain.set_attn_implementation("eager")
    layer = model.memory.tokens.layer
    maps = mnemic.attention_maps(model, tokenizer, text)["self"]
    tokens = torch.tensor([tokenizer.eos_token_id, *tokenizer(text).input_ids])  # documents have it between them
    expected = by_hand(plain, layer.vectors.detach(), layer.scale.detach(), tokens)
    torch.testing.assert_close(maps.weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "mistral", "bloom", "mnemic-t5", "mnemic-xl"])
def test_a_recurrent_memory_writes(architecture: str, tokenizer: Any) -> None:
    model = made(architecture, tokenizer)
    maps = mnemic.attention_maps(model, tokenizer, TEXT)
    stack, length = maps["self"], COUNT + 6  # 22 tokens are two segments of 8 and 6 more
    assert stack.weights.shape == (2, 4, length, length)
    assert "".join(stack.keys) == "[mem 1][mem 2][mem 3]signed"
    torch.testing.assert_close(stack.weights.sum(-1), torch.ones(2, 4, length))
    assert stack.causal
    assert not stack.blind
    assert (stack.blocks["write"] > 0).all()  # the memory sees the whole segment
    assert (stack.blocks["update"].triu(1) == 0).all()  # and no token what comes after it
    assert (stack.blocks["read"] > 0).all()
    assert [note for note in maps.notes() if "behind" in note] == maps.notes() != []
    for layer, row in zip(stack.weights, stack.summary(), strict=True):
        assert row["write"] == pytest.approx(layer[:, :COUNT, COUNT:].sum(-1).mean().item(), rel=1e-4)


def test_what_was_read_before_counts_and_nothing_is_added_to_it(tokenizer: Any) -> None:
    model = made("llama", tokenizer)
    alone = mnemic.attention_maps(model, tokenizer, TEXT)["self"].weights
    model.memory.read(torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0)))
    before = model.memory.state()
    first, again = (mnemic.attention_maps(model, tokenizer, TEXT)["self"].weights for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, alone, atol=1e-4)
    after = model.memory.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model.memory.reset()
    assert torch.equal(mnemic.attention_maps(model, tokenizer, TEXT)["self"].weights, alone)


def test_a_memory_behind_the_text_may_store_fuse_and_copy() -> None:
    """Its rows see the whole memory and the text, as an encoder's do; the text sees what comes before it."""
    m, n = 4, 6
    weights = torch.zeros(1, 1, m + n, m + n)
    weights[..., :m, :m] = torch.eye(m)
    weights[..., m:, :] = torch.ones(n, m + n).tril(m)
    weights = weights / weights.sum(-1, keepdim=True)
    labels = [str(number) for number in range(m + n)]
    stack = StackMaps(weights, labels, labels, m, m, causal=True, behind=True)
    assert stack.measures["store"].item() == 1
    assert stack.operations() == [["store"]]
    assert stack.measures["read_strength"].item() == pytest.approx(0, abs=1e-7)
    even = weights.clone()
    even[..., :m, :m] = 1 + torch.ones(m, m).tril()  # before the text, and behind it up to itself
    even[..., :m, m:] = 1
    even[..., :m, :] /= even[..., :m, :].sum(-1, keepdim=True)
    found = StackMaps(even, labels, labels, m, m, causal=True, behind=True)
    assert found.measures["write_strength"].item() == pytest.approx(0, abs=1e-7)
    assert found.operations() == [["none"]]
