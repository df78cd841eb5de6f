"""Forks processes that build a store, each to be killed: imports torch once, then obeys orders (see killing)."""

from __future__ import annotations

from typing import Any

import torch

import mnemic
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from mnemic.stores.build import add_to_store
from tests.crash.killing import obey

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"index": "IVF4,Flat"},
    "exact": {"keys": "float32", "index": "exact", "commit_rows": 40},
    "dropping": {"max_probability": 0.0039, "metric": "cosine"},
}
SETTINGS = {"window": 12, "batch_size": 3, "commit_rows": 90}


def corpus() -> Corpus:
    said = "the store holds what the model has seen and where it was that it saw it"
    words = said.split()
    texts = [" ".join(words[(n * i + n) % len(words)] for i in range(2 + n % 9)) for n in range(30)]
    return Corpus("crash", {"train": lambda: [Document(f"{n}.txt", text) for n, text in enumerate(texts)]})


def build(kind: str, out: str) -> None:
    """Builds a store of this kind; "visit" adds another text to the store that is there, and forgets it."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([], "byte")
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    model = MnemicDecoderForCausalLM(MnemicDecoderConfig(**shape))
    if kind == "visit":
        other = Corpus("other", {"train": lambda: [Document("other.txt", "quite another text. " * 20)]})
        with mnemic.open_store(out) as store:
            add_to_store(store, model, tokenizer, other, namespace="visitor")
            store.delete("visitor")
            store.compact()
        return
    mnemic.build_store(model, tokenizer, corpus(), out, **{**SETTINGS, **KINDS[kind]}).close()


def main() -> None:
    torch.set_num_threads(1)
    build("plain", "ram:")  # imports all there is to import: children are killed while they build
    obey(build)


if __name__ == "__main__":
    main()
