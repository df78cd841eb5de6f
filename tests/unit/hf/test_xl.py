"""An XL cache in models of transformers: read in pieces, against one forward with a mask that says who sees whom."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from tests.contract.architectures import VOCABULARY, build

ROTARY = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_neox", "phi", "olmo2"]


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def with_cache(architecture: str, xl_length: int, **changes: Any) -> Any:
    memory = mnemic.KNNAttention.pretrained(layers=[1], k=3, size=100, xl_length=xl_length, **changes)
    return mnemic.augment(build(architecture), memory).double().eval()


def read(model: Any, text: Tensor, pieces: list[int], starts: Tensor | None = None) -> Tensor:
    cache, found, begin = model.memory.new_cache(len(text)), [], 0
    with torch.no_grad():
        for length in pieces:
            part = {"input_ids": text[:, begin : begin + length]}
            if starts is not None:
                part["document_starts"] = starts[:, begin : begin + length]
            found.append(model(**part, past_key_values=cache, use_cache=True).logits)
            begin += length
    return torch.cat(found, 1)


@pytest.mark.parametrize("architecture", ROTARY)
@pytest.mark.parametrize("pieces", [[5, 5, 5, 5], [1] * 20, [3, 7, 1, 9], [20]])
@pytest.mark.parametrize("xl_length", [1, 4, 30])
def test_a_token_sees_its_piece_and_the_last_tokens_before_it(
    architecture: str, pieces: list[int], xl_length: int
) -> None:
    text, base = tokens(2, 20), build(architecture).double().eval()
    starts = [sum(pieces[:n]) for n, length in enumerate(pieces) for _ in range(length)]
    place = torch.arange(20)
    visible = (place[None] <= place[:, None]) & (place[None] >= (torch.tensor(starts) - xl_length)[:, None])
    full = torch.zeros(20, 20).double().masked_fill(~visible, torch.finfo(torch.float64).min)
    mask: Any = full.expand(2, 1, -1, -1)
    if architecture in ("mistral", "gemma3"):
        near = visible & (place[:, None] - place[None] < 8)
        window = torch.zeros(20, 20).double().masked_fill(~near, torch.finfo(torch.float64).min).expand(2, 1, -1, -1)
        mask = window if architecture == "mistral" else {"full_attention": mask, "sliding_attention": window}
    with torch.no_grad():
        expected = base(text, attention_mask=mask, position_ids=place[None]).logits
    torch.testing.assert_close(read(with_cache(architecture, xl_length), text, pieces), expected)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("xl_length", [2, 30])
def test_documents_back_to_back_are_documents_apart(architecture: str, xl_length: int) -> None:
    model, text = with_cache(architecture, xl_length), tokens(2, 12)
    for border in range(1, 12):
        starts = torch.zeros(2, 12, dtype=torch.bool)
        starts[0, border] = starts[1, 12 - border] = True
        together = read(model, text, [4, 4, 4], starts)
        for row, at in ((0, border), (1, 12 - border)):
            ends = [at, *range(at - at % 4 + 4, 13, 4)]
            pieces = [b - a for a, b in itertools.pairwise(ends)]
            alone = read(model, text[row : row + 1, at:], pieces)
            torch.testing.assert_close(together[row : row + 1, at:], alone)


def test_padding_takes_no_room() -> None:
    model, text = with_cache("llama", 4), tokens(1, 12)
    expected = read(model, text, [6, 6])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), text[:, :6]], 1)
    cache = model.memory.new_cache(1)
    with torch.no_grad():
        mask = torch.tensor([[0] * 3 + [1] * 6])
        first = model(padded, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, 3:]
        second = model(text[:, 6:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat([first, second], 1), expected)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_generation_goes_on_for_longer_than_the_context(architecture: str, beams: int) -> None:
    model = with_cache(architecture, 8)
    with torch.no_grad():
        model.memory.attention.layers["1"].gate.fill_(0.07)
    prompt = tokens(2, 40)
    how = {"do_sample": False, "max_new_tokens": 30, "min_new_tokens": 30, "num_beams": beams, "pad_token_id": 0}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), prefill_chunk_size=10, **how)
    assert out.shape == (2, 70)
    alone = model.generate(prompt[1:], attention_mask=torch.ones(1, 40), prefill_chunk_size=10, **how)
    assert torch.equal(alone[0], out[1])
    if architecture == "gemma3":  # which says the same over and over, with and without memory
        return
    with model.memory.disabled():
        assert not torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **how), out)


def test_what_cannot_have_an_xl_cache_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="rotary positions"):
        with_cache("gpt2", 4)
    model = with_cache("llama", 4).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="gradient checkpointing"):
        model(tokens(1, 4), past_key_values=model.memory.new_cache(1))
    with pytest.raises(UsageError, match="expected 0 or more"):
        mnemic.KNNAttention(xl_length=-1)
