"""A real pretrained model (stories260K, a small Llama): a neutral memory changes no word, and learns alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import mnemic

WEIGHTS = Path(__file__).parents[3] / "shared/data/weights/stories260K"

pytestmark = pytest.mark.skipif(not WEIGHTS.is_dir(), reason="the pretrained weights (stories260K) are not here")


def story(model: Any, length: int = 120) -> torch.Tensor:
    start = torch.tensor([[1]])
    return model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=length)


def test_a_neutral_memory_changes_no_word() -> None:
    base = story(LlamaForCausalLM.from_pretrained(WEIGHTS))
    model = mnemic.augment(LlamaForCausalLM.from_pretrained(WEIGHTS), mnemic.MemoryTokens(count=8, gated=True))
    assert torch.equal(story(model), base)
    model.memory.detach()
    plain = mnemic.augment(model, mnemic.MemoryTokens(count=8))
    assert not torch.equal(story(plain), base)


@pytest.mark.parametrize("gated", [False, True])
def test_tokens_alone_learn_a_text_the_base_does_not_know(gated: bool) -> None:
    torch.manual_seed(0)
    model = mnemic.augment(LlamaForCausalLM.from_pretrained(WEIGHTS), mnemic.MemoryTokens(count=8, gated=gated))
    text = torch.randint(3, 400, (1, 12)).repeat(1, 5)
    with torch.no_grad(), model.memory.disabled():
        before = model(text, labels=text).loss.item()
    model.requires_grad_(False)
    model.memory.requires_grad_(True)
    optimizer = torch.optim.Adam(model.memory.parameters(), lr=3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.8 * before
