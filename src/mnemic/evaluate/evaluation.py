"""Measuring a model on a corpus, without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mnemic.data import Document, TokenizedCorpus, open_corpus, tokenize_corpus
from mnemic.data.pair_batches import tokenize_pairs
from mnemic.errors import UsageError
from mnemic.evaluate.config import METRICS, EvaluateConfig
from mnemic.train.objectives import check_vocabulary, model_kind
from mnemic.train.report import versions
from mnemic.train.seq2seq import check_parallel
from mnemic.train.state import untouched


class Result(dict[str, Any]):
    """The figures of an evaluation and what made them; a dict of plain values, ready for JSON."""


def evaluate(model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig | None = None, **options: Any) -> Result:
    """Measures `model` on a corpus (a name, a path or a Corpus) as `config`, or options by name, say.

    Afterwards the model's modes and the random generators are as before, and nothing was added to any cache of it.

    >>> mnemic.evaluate(model, tokenizer, "stdlib", window=256, stride=128)["perplexity"]
    """
    if config is not None and options:
        raise UsageError("give evaluate either an EvaluateConfig or options by name, not both")
    config = config or EvaluateConfig.from_dict(options)
    corpus = open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    text = text_of(model, tokenizer, corpus, config)
    result = Result(model=type(model).__name__, corpus=corpus.name)
    with untouched(model):
        for metric in config.metrics:
            result |= METRICS.load(metric)(model, tokenizer, text, config)
    settings = {name: value for name, value in config.to_dict().items() if name != "schema"}
    return Result(result | {"documents": len(text.tokens), **settings, "versions": versions()})


class Text:
    """The documents to measure on: their token ids, and how much text they are in other units."""

    def __init__(self, corpus: Any, tokenizer: Any, config: EvaluateConfig) -> None:
        self.characters = 0
        documents: Iterator[Document] = islice(corpus.documents(config.split), config.max_documents)
        if config.max_tokens is not None:
            documents = _until(documents, tokenizer, config.max_tokens)
        self.tokens: TokenizedCorpus = tokenize_corpus(self._counted(documents), tokenizer)
        self.words = int(self.tokens.word_counts.sum())
        self.bytes = int(self.tokens.byte_counts.sum())

    def _counted(self, documents: Iterator[Document]) -> Iterator[Document]:
        for document in documents:
            self.characters += len(document.text)
            yield document


class PairedText:
    """The pairs to measure on: their token ids, the targets' texts, and how much text these are in other units."""

    def __init__(self, corpus: Any, tokenizer: Any, config: EvaluateConfig) -> None:
        pairs = list(islice(check_parallel(corpus).pairs(config.split), config.max_documents))
        if config.max_tokens is not None:
            targets = (pair.target for pair in pairs)
            pairs = pairs[: sum(1 for _ in _until(targets, tokenizer, config.max_tokens))]
        self.tokens = tokenize_pairs(lambda: pairs, tokenizer)
        self.references = [pair.target.text for pair in pairs]
        self.characters = sum(map(len, self.references))
        self.words = int(self.tokens.target.word_counts.sum())
        self.bytes = int(self.tokens.target.byte_counts.sum())


def text_of(model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig) -> Text | PairedText:
    """What a model is to be measured on: documents, or pairs for one that translates."""
    check_vocabulary(model, tokenizer)
    return (PairedText if model_kind(model) == "seq2seq" else Text)(corpus, tokenizer, config)


def _until(documents: Iterator[Document], tokenizer: Any, most: int) -> Iterator[Document]:
    """Documents up to the one with which there are `most` tokens to predict; whole ones, so that words count right."""
    seen = 0
    while seen < most and (document := next(documents, None)) is not None:
        seen += len(tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]) + 1
        yield document
