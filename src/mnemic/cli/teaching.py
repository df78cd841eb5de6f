"""The demo's second part: a trained model is taught a text by a store, without training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

KNOWN_DOCUMENTS = 12  # of the training text that are in the store before anything is taught


@dataclass(frozen=True)
class Lesson:
    """What teaching did: perplexities on the second halves of documents, and what the model writes there."""

    documents: int
    plain: float  # of the model alone
    known: float  # with a store of text that it was trained on
    taught: float  # once the first halves were added to that store
    seconds: float  # that adding took
    rows: int  # that were added
    prompt: str
    samples: dict[str, str]

    def sentences(self) -> list[str]:
        """The figures in words."""
        return [
            f"Taught without training: on the second halves of {self.documents} documents that it has never seen, the "
            f"model without memory has a perplexity of {self.plain:.1f}; with a store of text that it was trained on "
            f"{self.known:.1f}; and once the first halves were added to the store, {self.rows:,} rows in "
            f"{self.seconds:.1f} s, {self.taught:.1f}. No weight was changed.",
            *(f"{name}, after {self.prompt!r}: {' '.join(text.split())[:100]}" for name, text in self.samples.items()),
        ]


def teach(run: Path, corpus: Any, folder: Path, window: int) -> Lesson:
    """Builds a store of known text for the model of a run, tunes it, and adds the first halves of new documents."""
    from mnemic.augment import augment
    from mnemic.cli.loading import load_model
    from mnemic.evaluate import EvaluateConfig, evaluate
    from mnemic.evaluate.tuning import tune
    from mnemic.memories.output.config import OutputMemory
    from mnemic.stores.build import add_to_store, build_store

    model, tokenizer = load_model(str(run))
    first, second = halves(corpus, 0), halves(corpus, 1)
    reading = EvaluateConfig(split="test", window=window)
    plain, prompt = evaluate(model, tokenizer, second, reading)["perplexity"], opening(second)
    samples = {"alone": continued(model, tokenizer, prompt)}
    known = beginning(corpus, "train", KNOWN_DOCUMENTS)
    with build_store(model, tokenizer, known, folder / "taught.store", window=window) as store:
        augment(model, OutputMemory.knn(store, k=256))  # type: ignore[arg-type]
        some = beginning(corpus, "valid", 2)
        tune(model, tokenizer, some, EvaluateConfig(split="valid", window=window)).put_into(model)
        before = evaluate(model, tokenizer, second, reading)["perplexity"]
        start = time.perf_counter()
        added = add_to_store(store, model, tokenizer, first, split="test", namespace="taught")["added"]
        seconds = time.perf_counter() - start
        after = evaluate(model, tokenizer, second, reading)["perplexity"]
        samples["taught"] = continued(model, tokenizer, prompt)
    return Lesson(sum(1 for _ in second.documents("test")), plain, before, after, seconds, added, prompt, samples)


def beginning(corpus: Any, split: str, documents: int) -> Any:
    """The first documents of a split, as a corpus."""
    from mnemic.data import Corpus

    return Corpus(f"{corpus.name}, beginning", {split: lambda: islice(corpus.documents(split), documents)})


def opening(corpus: Any) -> str:
    """The first lines of the first document of the test split that say anything, comments left out."""
    lines = next(iter(corpus.documents("test"))).text.splitlines(keepends=True)
    return "".join([line for line in lines if line.strip() and not line.lstrip().startswith("#")][:3])[:200]


def continued(model: Any, tokenizer: Any, prompt: str) -> str:
    """What a model writes after a prompt, if it always takes the likeliest token."""
    from mnemic.cli.generate import GenerateConfig, write

    return write(model, tokenizer, prompt, GenerateConfig(max_new_tokens=40, greedy=True))


def halves(corpus: Any, which: int) -> Any:
    """The first (0) or second (1) half of each test document of a corpus, cut at the end of a line if it has one."""
    from mnemic.data import Corpus, Document

    def read() -> Iterator[Any]:
        for document in corpus.documents("test"):
            middle = len(document.text) // 2
            cut = document.text.rfind("\n", 0, middle) + 1 or middle
            if cut:
                yield Document(document.id, document.text[cut:] if which else document.text[:cut])

    return Corpus(f"{corpus.name}, {('first', 'second')[which]} halves", {"test": read})
