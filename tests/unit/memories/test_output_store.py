"""Rows of a store as a memory."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.losses import token_losses
from mnemic.stores import References, StoreConfig, open_store
from tests.contract.architectures import VOCABULARY, build
from tests.unit.memories.test_output import (
    LENGTH,
    TEXTS,
    augmented,
    byte_model,
    corpus,
    keys_and_logits,
    mixture,
    score,
    tokens,
)

__all__ = ["byte_model"]


def store_of(count: int, width: int, metric: str = "ip", **options: Any) -> Any:
    rng = np.random.default_rng(0)
    store = open_store("ram:", StoreConfig(dim=width, metric=metric, keys="float32", **options))
    if count:
        for name in ("red", "blue"):
            keys = rng.standard_normal((count, width)).astype(np.float32)
            store.add(keys, rng.integers(3, VOCABULARY, count), References.of(name, range(count), name))
        store.commit()
    return store


@pytest.mark.parametrize(("metric", "similarity"), [("ip", "dot"), ("l2", "distance")])
def test_the_similarity_is_that_of_the_store_unless_it_is_set(metric: str, similarity: str, tmp_path: Path) -> None:
    store, ids = store_of(20, 32, metric), tokens(1, LENGTH)
    unset, given = mnemic.OutputMemory(external=store), mnemic.OutputMemory(external=store, similarity=similarity)
    assert unset.similarity == "auto"
    assert mnemic.OutputMemory().similarity == unset.neutral().similarity == "dot"
    models = [mnemic.augment(build("gpt2").double(), config).eval() for config in (unset, given)]
    for model in models:
        assert model.memory.output.config == given
        assert model.memory.output.config.store is store
    with torch.no_grad():
        assert torch.equal(*(model(ids).logits for model in models))
    given.save(tmp_path / "memory.toml")
    assert mnemic.OutputMemory.load(tmp_path / "memory.toml").similarity == similarity
    assert unset.similarity == "auto"  # the user's own settings stay as they were


@pytest.mark.parametrize(("similarity", "metric"), [("dot", "ip"), ("distance", "l2")])
@pytest.mark.parametrize("namespaces", [[], ["blue"]])
def test_rows_of_a_store_are_a_memory(similarity: str, metric: str, namespaces: list[str]) -> None:
    store, ids = store_of(20, 32, metric), tokens(2, LENGTH)
    model = augmented(
        external=store, k=5, local=False, similarity=similarity, weight=0.25, mix_temperature=3.0, namespaces=namespaces
    )
    config = model.memory.configs[0]
    assert config.external == "ram:"
    keys, logits = keys_and_logits(model, ids)
    rows = store.get(range(20 if namespaces else 0, 40)) if namespaces else store.get(range(40))
    with torch.no_grad():
        found = model(ids).logits.softmax(-1)
        losses = token_losses(model, ids.roll(-1, 1), input_ids=ids)[0]
    for row in range(2):
        for t in range(LENGTH):
            query = keys[row, t].float().double()
            scores = [score(query, torch.from_numpy(key).double(), config) for key in rows.keys]
            best = sorted(range(len(scores)), key=lambda n: -scores[n])[:5]
            pairs = [(scores[n], int(rows.values[n])) for n in best]
            wanted = mixture(logits[row, t], float(logits[row, t].logsumexp(-1)), pairs, config)
            torch.testing.assert_close(found[row, t], wanted, rtol=1e-4, atol=1e-6)
            following = int(ids[row, (t + 1) % LENGTH])
            assert float(losses[row, t]) == pytest.approx(-math.log(wanted[following]), rel=1e-4)


def test_an_empty_store_and_one_with_fewer_rows_than_k() -> None:
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        model = augmented(external=store_of(0, 32), local=False, weight=0.5)
        with model.memory.disabled():
            plain = model(ids).logits
            losses = token_losses(model, ids.roll(-1, 1), input_ids=ids)[0]
        assert torch.equal(model(ids).logits, plain)
        torch.testing.assert_close(token_losses(model, ids.roll(-1, 1), input_ids=ids)[0], losses, rtol=1e-12, atol=0)
        few = augmented(external=store_of(2, 32), k=1024, local=False)
        assert few(ids).logits.isfinite().all()
        assert not torch.allclose(few(ids).logits, plain)


def test_a_store_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="similarity = 'distance', or build a store with metric = 'ip'"):
        augmented(external=store_of(3, 32, "l2"), similarity="dot")
    with pytest.raises(UsageError, match="similarity = 'dot', or build a store with metric = 'l2'"):
        mnemic.augment(build("gpt2"), mnemic.OutputMemory.knn(store_of(3, 32)))
    with pytest.raises(UsageError, match="needs one with metric = 'ip' or 'l2'"):
        augmented(external=store_of(3, 32, "cosine"))
    base = build("gpt2")
    with pytest.raises(UsageError, match="no store"):
        mnemic.augment(base, mnemic.OutputMemory(external="nowhere.store"))
    assert not hasattr(base, "memory")
    with pytest.raises(UnsupportedModel, match="predicts none"):
        mnemic.augment(build("bert"), mnemic.OutputMemory())
    for options in ({"long": 5}, {"training": "consecutive"}):
        with pytest.raises(UsageError, match="pairs do not go on"):
            mnemic.augment(build("marian"), mnemic.OutputMemory(**options))


def test_a_store_is_built_as_the_memory_compares(byte_model: Any, tmp_path: Path) -> None:
    model, tokenizer = byte_model
    made = {}
    for key, similarity, metric in (("ffn", "dot", "ip"), ("output", "distance", "l2")):
        mnemic.augment(model, mnemic.OutputMemory(key=key, similarity=similarity))
        with mnemic.build_store(model, tokenizer, corpus(*TEXTS), tmp_path / key, split="valid", window=8) as store:
            assert store.config.metric == metric
            made[key] = store.config.origin["layer"]
    assert made["ffn"] != made["output"]
    with mnemic.open_store(tmp_path / "ffn") as store, pytest.raises(UsageError, match="build the store with layer"):
        mnemic.augment(model, mnemic.OutputMemory(key="output", external=store))
    model.memory.detach()
    with mnemic.build_store(model, tokenizer, corpus(*TEXTS), tmp_path / "none", split="valid", window=8) as store:
        assert (store.config.metric, store.config.origin["layer"]) == ("l2", made["ffn"])


def test_the_dial_of_the_search_is_the_memory_s(byte_model: Any) -> None:
    model, tokenizer = byte_model
    rows, dials = store_of(5, 16), list[Any]()
    search = rows.search
    rows.search = lambda queries, k, where, recall: dials.append(recall) or search(queries, k, where, recall)
    for recall in (None, 0.5):
        model = mnemic.augment(model, mnemic.OutputMemory(external=rows, recall=recall))
        mnemic.evaluate(model, tokenizer, corpus("a dog"))
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, pad_token_id=0)
    assert dials == [None, None, 0.5, 0.5]
    with pytest.raises(UsageError, match="above 0"):
        mnemic.OutputMemory(recall=0)


def test_a_search_while_the_model_goes_on_finds_the_same(byte_model: Any) -> None:
    model, tokenizer = byte_model
    rng, threads = np.random.default_rng(0), set[str]()
    rows = open_store("ram:", StoreConfig(dim=16, metric="ip", keys="float32"))
    rows.add(rng.standard_normal((50, 16)).astype(np.float32), rng.integers(97, 123, 50), References.of("d", range(50)))
    rows.commit()
    search = rows.search

    def watched(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return search(*arguments)

    rows.search = watched
    found = []
    for overlap in (False, True):
        mnemic.augment(model, mnemic.OutputMemory(external=rows, long=8, weight=0.3, overlap=overlap))
        found.append(mnemic.evaluate(model, tokenizer, corpus(*TEXTS), window=8)["nll"])
    assert found[0] == found[1]
    assert threads == {"MainThread", "mnemic-search"}

    def broken(*arguments: Any) -> Any:
        raise UsageError("the store is closed")

    rows.search = broken
    with pytest.raises(UsageError, match="the store is closed"):
        mnemic.evaluate(model, tokenizer, corpus(*TEXTS), window=8)
