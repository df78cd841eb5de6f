"""Training with the segment before as a memory that is as it was: for models that read on from batch to batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.errors import UsageError
from mnemic.hf.losses import token_losses

from .test_output import LENGTH, augmented, keys_and_logits, tokens

ROWS = 2


def two_segments() -> tuple[Tensor, Tensor]:
    """A text of two segments in each row, and the token after each."""
    ids = tokens(ROWS, 2 * LENGTH, seed=3) % 7 + 3  # few tokens: memories meet targets
    return ids, ids.roll(-1, 1)


def losses(model: Any, ids: Tensor, targets: Tensor, starts: Tensor, state: Any, part: slice) -> Tensor:
    inputs = {"input_ids": ids[:, part], "document_starts": starts[:, part], "memory_state": state}
    return token_losses(model, targets[:, part], **inputs)[0]


def naive(logits: Tensor, queries: Tensor, pairs: list[list[tuple[Tensor, int]]], targets: Tensor) -> Tensor:
    """-log P of Eq. 5 for the contexts (T, d) of one row, each with its own pairs; differentiable."""
    rows = []
    for t, target in enumerate(targets.tolist()):
        masses = logits[t].exp()
        scores = [(queries[t] @ key / len(key) ** 0.5).exp() for key, _ in pairs[t]]
        own = sum((s for s, (_, value) in zip(scores, pairs[t], strict=True) if value == target), masses[target])
        rows.append(sum(scores, masses.sum()).log() - own.log())
    return torch.stack(rows)


@pytest.mark.parametrize("start", [None, LENGTH, LENGTH + 4, 5])
def test_a_segment_sees_the_one_before_of_its_document(start: int | None) -> None:
    model = augmented(training="previous", plain_start=0.0).train()
    ids, targets = two_segments()
    starts = torch.zeros_like(ids, dtype=torch.bool)
    if start is not None:
        starts[1, start] = True
    first, second = slice(0, LENGTH), slice(LENGTH, 2 * LENGTH)
    state = model.memory.new_state(ROWS)
    losses(model, ids, targets, starts, state, first)
    found = losses(model, ids, targets, starts, state, second)
    documents = starts.long().cumsum(1)
    for row in range(ROWS):
        cuts = sorted({0, LENGTH, 2 * LENGTH, *starts[row].nonzero().flatten().tolist()})
        read = [keys_and_logits(model, ids[row : row + 1, a:b]) for a, b in pairwise(cuts)]
        keys, logits = (torch.cat([r[which][0] for r in read]) for which in (0, 1))
        values = targets[row].tolist()
        seen = [
            [(keys[j], values[j]) for j in range(t) if documents[row, j] == documents[row, t]]
            for t in range(LENGTH, 2 * LENGTH)
        ]
        wanted = naive(logits[second], keys[second], seen, targets[row, second])
        torch.testing.assert_close(found[row].detach(), wanted, rtol=1e-6, atol=1e-8)


def test_no_gradient_goes_into_the_segment_before() -> None:
    model = augmented(training="previous", plain_start=0.0).train()
    ids, targets = two_segments()
    starts, state = torch.zeros_like(ids, dtype=torch.bool), model.memory.new_state(ROWS)
    losses(model, ids, targets, starts, state, slice(0, LENGTH))
    assert not any(tensor.requires_grad for tensor in state["output"].tensors().values())
    held = {name: tensor.clone() for name, tensor in state["output"].tensors().items()}
    parameter = model.transformer.h[-1].attn.c_proj.weight

    def again() -> Tensor:
        state["output"].load_tensors(held)
        return losses(model, ids, targets, starts, state, slice(LENGTH, 2 * LENGTH)).sum()

    again().backward()
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).double()
    slopes = []
    with torch.no_grad():
        for step in (1e-6, -1e-6):
            parameter += step * direction
            slopes.append(again())
            parameter -= step * direction
    slope = float(slopes[0] - slopes[1]) / 2e-6
    assert slope == pytest.approx(float((parameter.grad * direction).sum()), rel=1e-4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([Document("a", "to be")], "byte")


def small_sru(tokenizer: Any, memory: mnemic.OutputMemory) -> Any:
    torch.manual_seed(0)
    config = mnemic.models.MnemicSRUConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, attention_size=8, xl_length=8
    )
    return mnemic.augment(mnemic.models.MnemicSRUForCausalLM(config), memory)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sru_trains_with_it_and_goes_on_exactly(accumulate: int, tmp_path: Any, tokenizer: Any) -> None:
    texts = [Document(str(i), "to be or not to be, that is the question " * (3 + i)) for i in range(6)]
    corpus = Corpus("said", {"train": lambda: iter(texts)})
    memory = mnemic.OutputMemory(training="previous", plain_start=0.0)
    options = {"batch_size": 4, "segment_length": 8, "accumulate": accumulate, "checkpoint_every": 4, "warmup": 2}
    options |= {"learning_rate": 0.01, "log_every": 1}

    def run(name: str, steps: int, **more: Any) -> list[float]:
        config = mnemic.TrainConfig(steps=steps, out=str(tmp_path / name), schedule="constant", **options, **more)
        return list(mnemic.train(small_sru(tokenizer, memory), tokenizer, corpus, config).losses)

    straight = run("straight", 8)
    run("stopped", 4)
    assert run("stopped", 8, resume=True) == straight
    memory = mnemic.OutputMemory(training="local", plain_start=0.0)
    local = run("local", 8)
    assert local[0] == straight[0]  # nothing came before
    assert all(one != other for one, other in zip(local[1:], straight[1:], strict=True))


def test_rows_that_do_not_read_on_are_refused() -> None:
    model = augmented(training="previous")
    with pytest.raises(UsageError, match="rows that read on from batch to batch: train with batching"):
        model.memory.output.check_training(mnemic.TrainConfig(batching="shuffled"), "causal")
    with pytest.raises(UsageError, match="pairs do not go on"):
        augmented("t5", training="previous")
