"""Measuring a model on a corpus, without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mnemic.augment import AugmentedModel
from mnemic.data import Document, TokenizedCorpus, open_corpus, tokenize_corpus
from mnemic.data.pair_batches import tokenize_pairs
from mnemic.data.tasks import Task
from mnemic.errors import UsageError
from mnemic.evaluate.config import METRICS, EvaluateConfig
from mnemic.hf.positions import positions
from mnemic.train.config import TrainConfig
from mnemic.train.fine_tuning import TABLE_3
from mnemic.train.objectives import check_length, check_vocabulary, make_objective, model_kind, refuse_task
from mnemic.train.report import versions
from mnemic.train.seq2seq import check_parallel
from mnemic.train.state import untouched


class Result(dict[str, Any]):
    """The figures of an evaluation and what made them; a dict of plain values, ready for JSON."""


def evaluate(model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig | None = None, **options: Any) -> Result:
    """Measures `model` on a corpus (a name, a path or a Corpus) as `config`, or options by name, say.

    Afterwards the model's modes and the random generators are as before, and nothing was added to any cache of it.
    What its memory has read (`model.memory.read`) stands before every text.

    >>> mnemic.evaluate(model, tokenizer, "stdlib", window=256, stride=128)["perplexity"]
    """
    if config is not None and options:
        raise UsageError("give evaluate either an EvaluateConfig or options by name, not both")
    config = config or EvaluateConfig.from_dict(options)
    corpus = open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    text = text_of(model, tokenizer, corpus, config)
    usual = USUAL[model_kind(model)]
    metrics = [usual if metric == "auto" else metric for metric in config.metrics]
    if isinstance(text, TaskText) and (
        other := [metric for metric in metrics if metric not in (usual, "memory_usage")]
    ):
        raise UsageError(f"{other[0]} is of language models: {type(model).__name__} is measured with {usual!r}")
    result = Result(model=type(model).__name__, corpus=corpus.name)
    with untouched(model):
        for metric in metrics:
            result |= METRICS.load(metric)(model, tokenizer, text, config)
    settings = {name: value for name, value in config.to_dict().items() if name != "schema"}
    used = {"metrics": metrics, "window": text.window}
    return Result(result | {"documents": len(text), **settings, **used, "versions": versions()})


USUAL = {"masked": "masked_loss", "classification": "task", "spans": "task"} | dict.fromkeys(
    ("causal", "seq2seq"), "perplexity"
)


class Text:
    """The documents to measure on: their token ids, and how much text they are in other units.

    They are read in windows of so many tokens as the config says, or else of a memory's own segment.
    """

    def __init__(self, corpus: Any, tokenizer: Any, config: EvaluateConfig, segment: int | None = None) -> None:
        self.window = config.window or segment or config.text_window
        self.characters = 0
        documents: Iterator[Document] = islice(corpus.documents(config.split), config.max_documents)
        if config.max_tokens is not None:
            documents = _until(documents, tokenizer, config.max_tokens)
        self.tokens: TokenizedCorpus = tokenize_corpus(self._counted(documents), tokenizer)
        self.words = int(self.tokens.word_counts.sum())
        self.bytes = int(self.tokens.byte_counts.sum())

    def __len__(self) -> int:
        return len(self.tokens)

    def _counted(self, documents: Iterator[Document]) -> Iterator[Document]:
        for document in documents:
            self.characters += len(document.text)
            yield document


class PairedText:
    """The pairs to measure on: their token ids, the targets' texts, and how much text these are in other units."""

    def __init__(self, corpus: Any, tokenizer: Any, config: EvaluateConfig) -> None:
        self.window = config.text_window
        pairs = list(islice(check_parallel(corpus).pairs(config.split), config.max_documents))
        if config.max_tokens is not None:
            targets = (pair.target for pair in pairs)
            pairs = pairs[: sum(1 for _ in _until(targets, tokenizer, config.max_tokens))]
        self.tokens = tokenize_pairs(lambda: pairs, tokenizer)
        self.references = [pair.target.text for pair in pairs]
        self.characters = sum(map(len, self.references))
        self.words = int(self.tokens.target.word_counts.sum())
        self.bytes = int(self.tokens.target.byte_counts.sum())

    def __len__(self) -> int:
        return len(self.tokens)


class TaskText:
    """The examples to measure on, by the parts of the split, and to how many tokens they are cut."""

    def __init__(self, model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig) -> None:
        if config.max_tokens is not None:
            raise UsageError(f"max_tokens = {config.max_tokens} is of texts: in a task give max_documents")
        objective: Any = make_objective("auto", model, tokenizer, config.seed)
        self.task: Task = objective.check(corpus)
        usual = TABLE_3[self.task.kind]["segment_length"]
        self.window: int = config.window or min(usual, positions(model) or usual)
        check_length(model, self.window, "window")
        self.stride = config.stride or TrainConfig().stride
        parts = self.task.parts(config.split).items()
        self.parts = {part: list(islice(self.task.examples(name), config.max_documents)) for part, name in parts}

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))


def text_of(model: Any, tokenizer: Any, corpus: Any, config: EvaluateConfig) -> Any:
    """What a model is to be measured on: documents, pairs for one that translates, or the examples of a task."""
    check_vocabulary(model, tokenizer)
    if (kind := model_kind(model)) in ("classification", "spans"):
        return TaskText(model, tokenizer, corpus, config)
    refuse_task(corpus, model)
    if kind == "seq2seq":
        return PairedText(corpus, tokenizer, config)
    return Text(corpus, tokenizer, config, model.memory.segment if isinstance(model, AugmentedModel) else None)


def _until(documents: Iterator[Document], tokenizer: Any, most: int) -> Iterator[Document]:
    """Documents up to the one with which there are `most` tokens to predict; whole ones, so that words count right."""
    seen = 0
    while seen < most and (document := next(documents, None)) is not None:
        seen += len(tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]) + 1
        yield document
