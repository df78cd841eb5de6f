"""Tiny models, texts and stores for the tests of building."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from mnemic.stores import Store, open_store
from tests.contract.architectures import ARCHITECTURES

CAUSAL = [
    name
    for name in ARCHITECTURES
    if ARCHITECTURES[name][0].__name__.endswith(("ForCausalLM", "LMHeadModel")) and "encoder" not in name
]
TEXTS = {
    "a.txt": "the memory reads what the segment before it wrote",
    "b.txt": "and forgets.",
    "c.txt": "a book, an article, a repository: a text that belongs together",
    "d.txt": "x",
}
BYTES = train_tokenizer([], "byte")


def corpus(texts: dict[str, str] | None = None) -> Corpus:
    documents = [Document(name, text) for name, text in (texts or TEXTS).items()]
    return Corpus("tiny", {"train": lambda: documents})


def tiny(name: str = "mnemic-t5", seed: int = 0) -> Any:
    """A random model of an architecture that has a vector for each byte."""
    kind, config = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = kind(type(config).from_dict({**config.to_dict(), "vocab_size": 264}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


def small(seed: int = 0, **settings: Any) -> Any:
    """A decoder of ours for the byte tokenizer."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": len(BYTES)}
    return MnemicDecoderForCausalLM(MnemicDecoderConfig(**shape, **settings)).eval()


def built(model: Any, **options: Any) -> Store:
    """A store in memory of all texts, its keys exact."""
    return mnemic.build_store(model, BYTES, corpus(), "ram:", **{"keys": "float32", **options})


def tokens_of(text: str) -> list[int]:
    end = BYTES.eos_token_id
    return [end, *text.encode(), end]


def everything(store: Store) -> tuple[Any, Any, list[tuple[str, str, int]]]:
    """All rows of a store from which nothing was deleted."""
    rows = store.get(np.arange(len(store)))
    places = [rows.references[number] for number in range(len(store))]
    return rows.keys, rows.values, [(source.namespace, source.document, position) for source, position in places]


def assert_same_rows(one: Store, other: Store) -> None:
    """The same keys, bit for bit, values and references."""
    first, second = everything(one), everything(other)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert first[2] == second[2]


class Stop(Exception):
    """As if the power had gone."""


def own_rows(path: Path, namespace: str = "default") -> tuple[Any, Any, list[Any]]:
    """The rows of a namespace in the order of their numbers, whatever these are."""
    with open_store(path) as store:
        found = store.search(np.ones((1, 16)), len(store), namespace, recall=1.0)
        rows = store.get(np.sort(found.ids[found.mask]))
    assert rows.keys is not None
    return rows.keys.tolist(), rows.values.tolist(), [rows.references[number] for number in range(len(rows.values))]
