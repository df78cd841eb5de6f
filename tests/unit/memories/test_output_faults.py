"""Uses of an output memory that would give wrong figures without a word: right, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mnemic
from mnemic.errors import UsageError
from mnemic.hf.losses import token_losses
from mnemic.memories.output import layer
from mnemic.memories.output.state import LongTerm
from tests.contract.architectures import build
from tests.unit.memories.test_output import LENGTH, TEXTS, augmented, byte_model, corpus, tokens
from tests.unit.memories.test_output_store import store_of

__all__ = ["byte_model"]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", [0, 20])
def test_two_distributions_apart_are_the_same_in_logits_and_losses(share: float, rows: int) -> None:
    memory = {"external": store_of(rows, 32), "joint": False, "training": "none", "k": 5, "weight": 0.6}
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        model = augmented(**memory, recent_weight=share, mix_temperature=2.0, recent_temperature=0.5)
        logits, losses = model(ids).logits, token_losses(model, ids.roll(-1, 1), input_ids=ids)[0]
    following = logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)
    torch.testing.assert_close(losses[:, :-1], -following[:, :-1], rtol=1e-6, atol=1e-6)
    together = token_losses(augmented(**memory, mix_temperature=0.5), ids.roll(-1, 1), input_ids=ids)[0]
    assert (not torch.allclose(together, losses)) == bool(rows), "with one memory only there is nothing to share"


def test_training_that_would_not_be_what_it_says_is_refused(byte_model: Any, tmp_path: Path) -> None:
    model, tokenizer = byte_model
    text = mnemic.data.Corpus("given", {"train": lambda: list(corpus(*TEXTS).documents("valid"))})
    settings = {"steps": 1, "batch_size": 4, "segment_length": 8, "out": str(tmp_path / "run")}
    for memory, options, sentence in (
        ({"training": "consecutive"}, {}, "batching = consecutive"),
        ({"training": "consecutive"}, {"batching": "consecutive"}, "consecutive = 4"),
        ({"external": store_of(3, 16)}, {}, "train without `external`"),
        ({"local": False}, {}, "local = False leaves"),
    ):
        mnemic.augment(model, mnemic.OutputMemory(**memory))
        with pytest.raises(UsageError, match=sentence):
            mnemic.train(model, tokenizer, text, mnemic.TrainConfig(**settings, **options))


def test_a_memory_that_cannot_be_put_in_leaves_the_one_that_is_there(byte_model: Any) -> None:
    model, tokenizer = byte_model
    mnemic.augment(model, mnemic.OutputMemory(long=6))
    before, handle = mnemic.evaluate(model, tokenizer, corpus(*TEXTS), window=8)["nll"], model.memory.output
    for wrong in ({"external": "missing.store"}, {"key": "ffn:99"}, {"external": store_of(3, 16, "cosine")}):
        with pytest.raises(UsageError):
            mnemic.augment(model, mnemic.OutputMemory(**wrong))
        assert model.memory.output is handle
        assert mnemic.evaluate(model, tokenizer, corpus(*TEXTS), window=8)["nll"] == before


def test_reading_into_a_store_asks_no_store(byte_model: Any, tmp_path: Path) -> None:
    model, tokenizer = byte_model
    asked, kept = [], []
    for connected in (False, True):
        if connected:
            rows = store_of(30, 16)
            rows.search = lambda *arguments: asked.append(arguments)
            mnemic.augment(model, mnemic.OutputMemory(external=rows, similarity="dot", weight=0.9))
        options = {"split": "valid", "window": 8, "max_probability": 0.004, "metric": "ip"}
        with mnemic.build_store(model, tokenizer, corpus(*TEXTS), tmp_path / str(connected), **options) as store:
            kept.append(len(store))
    assert not asked
    assert 0 < kept[0] < sum(len(text) + 1 for text in TEXTS)
    assert kept[0] == kept[1], "what the model itself gives a token"
    assert model.memory.output._on


def test_a_store_of_another_model_is_refused_however_it_is_given(byte_model: Any, tmp_path: Path) -> None:
    model, tokenizer = byte_model
    with mnemic.build_store(model, tokenizer, corpus(*TEXTS), tmp_path / "s", split="valid", window=8):
        pass
    torch.manual_seed(1)
    other = type(model)(model.config).double().eval()
    with mnemic.open_store(tmp_path / "s") as store, pytest.raises(UsageError, match="made by another model"):
        mnemic.augment(other, mnemic.OutputMemory.knn(store))
    with pytest.raises(UsageError, match="made by another model"):
        mnemic.augment(other, mnemic.OutputMemory.knn(str(tmp_path / "s")))
    with mnemic.open_store(tmp_path / "s", model=other, override=["model"]) as store:
        mnemic.augment(other, mnemic.OutputMemory.knn(store))


def test_a_document_that_begins_a_row_does_not_see_the_row_before(byte_model: Any) -> None:
    from mnemic.train.objectives import NextToken

    model, tokenizer = byte_model
    model = mnemic.augment(model, mnemic.OutputMemory(training="consecutive")).train()
    model.memory.begin_step(50, 100)
    ids = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[1] = ids[0]
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[:, 0] = True
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "document_starts": starts}
    batch |= {"attention_mask": torch.ones(2, 8, dtype=torch.long), "streams": torch.zeros(2, dtype=torch.long)}
    losses = NextToken(model, tokenizer, 0).losses(batch, None)
    torch.testing.assert_close(losses[0], losses[1])
    batch["document_starts"] = torch.zeros_like(starts)
    losses = NextToken(model, tokenizer, 0).losses(batch, None)
    assert losses[1].sum() < losses[0].sum(), "one text: what was read before is known"


def test_checkpointing_that_drops_the_gradient_is_refused() -> None:
    ids, norms = tokens(2, LENGTH), []
    for reentrant in (None, False, True):
        model = mnemic.augment(build("gpt2"), mnemic.OutputMemory()).train()
        model.memory.begin_step(50, 100)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            with pytest.raises(UsageError, match="use_reentrant"):
                token_losses(model, ids.roll(-1, 1), input_ids=ids, use_cache=False)
        else:
            token_losses(model, ids.roll(-1, 1), input_ids=ids, use_cache=False)[0].sum().backward()
            norms.append(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    torch.testing.assert_close(norms[0], norms[1])


@pytest.mark.parametrize("similarity", ["dot", "distance"])
def test_similarities_are_precise_where_the_model_is_not(similarity: str) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 20, 32), torch.randint(5, (1, 20))
    sight = layer.Own(torch.zeros_like(values))
    wanted = layer.mass(*layer.comparable(keys.double(), keys.double(), similarity), values, values, sight)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.mass(*layer.comparable(keys, keys, similarity), values, values, sight)
    torch.testing.assert_close(found.all, wanted.all.float(), rtol=1e-5, atol=1e-5)


def test_the_long_term_memory_holds_each_token_once() -> None:
    state, generator = LongTerm(100, 2), torch.Generator().manual_seed(0)
    for start in range(0, 400, 4):  # windows of 64 of which 4 tokens are new
        keys, labels = torch.randn(2, 64, 3, generator=generator), torch.zeros(2, 64, dtype=torch.long)
        new = torch.zeros(2, 64, dtype=torch.bool)
        new[:, -4:] = True
        state.append(keys, torch.full((2, 64), start), labels, new)
    assert state.keys.shape[1] <= 100 + 64 + 4
    assert (state.positions.diff(dim=1) == 1).all()


def test_a_memory_without_weight_asks_no_store(byte_model: Any) -> None:
    model, tokenizer = byte_model
    rows = store_of(3, 16)
    plain = mnemic.evaluate(model, tokenizer, corpus(*TEXTS), window=8)["nll"]
    memory = mnemic.OutputMemory(external=rows, joint=False, training="none", weight=0.0)
    mnemic.augment(model, memory)
    rows.search = lambda *arguments: pytest.fail("the store was searched")
    assert mnemic.evaluate(model, tokenizer, corpus(*TEXTS), window=8)["nll"] == plain
    assert np.isfinite(plain)


def test_a_batch_without_local_memory_has_none() -> None:
    ids, losses = tokens(3, LENGTH), []
    for options in ({"local": False}, {"local_dropout": 1.0}, {"local_dropout": 0.0}):
        model = augmented(training="batch", **options).train()
        model.memory.begin_step(50, 100)
        losses.append(token_losses(model, ids.roll(-1, 1), input_ids=ids)[0])
    torch.testing.assert_close(losses[0], losses[1])
    assert not torch.allclose(losses[0], losses[2])
