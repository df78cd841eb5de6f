"""A task that no model without memory can solve: names that were used thousands of tokens earlier."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.hf.losses import token_losses
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

CONTEXT, ROWS = 128, 16
FILLING, NAMES, USED = 8, 120, 32  # tokens that fill a text, names there are, and names that a text uses


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So that the same is learned everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loop(draw: random.Random) -> list[int]:
    """A context that repeats itself: what a model learns to look back by."""
    period = draw.choices(range(FILLING + NAMES), k=draw.randint(8, 40))
    return (period * CONTEXT)[:CONTEXT]


def text(draw: random.Random, gap: int, segments: int) -> list[int]:
    """Names, a long filling, the same names in the same order, and more filling."""
    names = draw.sample(range(FILLING, FILLING + NAMES), USED)
    between, after = (draw.choices(range(FILLING), k=count) for count in (gap, segments * CONTEXT))
    return (names + between + names + after)[: segments * CONTEXT + 1]


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)


def learn(optimizer: torch.optim.Optimizer, model: Any, loss: Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def losses(model: Any, ids: Tensor) -> Iterator[Tensor]:
    """The loss of each token after the first, a context at a time, with the memory of those before."""
    state = model.memory.new_state(len(ids))
    for start in range(0, ids.shape[1] - CONTEXT, CONTEXT):
        piece = ids[:, start : start + CONTEXT + 1]
        yield token_losses(model, piece[:, 1:], input_ids=piece[:, :-1], use_cache=False, memory_state=state)[0]


@pytest.mark.usefixtures("one_thread")
def test_names_are_copied_from_thousands_of_tokens_before() -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = MnemicDecoderConfig(vocab_size=FILLING + NAMES, position="t5", initializer_range=0.05, **shape)
    model = mnemic.augment(MnemicDecoderForCausalLM(config), mnemic.KNNAttention(layers=[1], k=8, size=4096)).train()
    optimizer = adam(model)
    for _ in range(600):
        rows = torch.tensor([loop(draw) for _ in range(ROWS)])
        learn(optimizer, model, model(input_ids=rows, labels=rows, use_cache=False).loss)
    twin = copy.deepcopy(model)  # learns the same from here on, in the same way, without a memory
    twin.memory.change("attention", size=0)

    lessons = [[text(draw, draw.randint(CONTEXT, 2 * CONTEXT), 4) for _ in range(ROWS)] for _ in range(20)]
    gap = 3000
    ids = torch.tensor([text(draw, gap, (gap + 2 * USED) // CONTEXT + 1) for _ in range(4)])
    again = slice(gap + USED, gap + 2 * USED - 1)  # all but the first name, which nothing foretells
    found = []
    for one in (model, twin):
        optimizer = adam(one)
        for texts in lessons:
            for segment in losses(one, torch.tensor(texts)):
                learn(optimizer, one, segment.mean())
        with torch.no_grad():
            found.append(torch.cat(list(losses(one.eval(), ids)), 1)[:, again].mean().item())
    assert found[0] < 1.0
    assert found[1] > math.log(NAMES) - 0.1
