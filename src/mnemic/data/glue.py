"""The nine tasks of GLUE (arXiv:1804.07461), from their official files or from the hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mnemic.data.documents import SPLITS
from mnemic.data.hub import HUB_SPLITS, paper_rows
from mnemic.data.local import listed, named_folder
from mnemic.data.reading import unpacked_name
from mnemic.data.tasks import Example, Task, read_label, read_tsv
from mnemic.errors import UsageError

MISMATCHED = "mismatched"  # the other parts of MNLI's valid and test splits: texts of genres that train has not

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layout:
    """Where the columns of a task are, and what its labels and figures are."""

    folder: str  # as the official download names it
    columns: tuple[str, ...]  # of the texts, in its files
    label: str  # the column of the label in its files
    hub_columns: tuple[str, ...]
    labels: tuple[str, ...] = ()  # in the order of the hub; none for a score
    metrics: tuple[str, ...] = ("accuracy",)
    header: tuple[str, ...] | None = None  # of files that do not name their columns
    parts: tuple[str, ...] = ("",)


_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_LAYOUTS = {
    "cola": _Layout(
        "CoLA",
        ("sentence",),
        "label",
        ("sentence",),
        ("unacceptable", "acceptable"),
        ("matthews",),
        header=("source", "label", "mark", "sentence"),
    ),
    "sst2": _Layout("SST-2", ("sentence",), "label", ("sentence",), ("negative", "positive")),
    "mrpc": _Layout(
        "MRPC", ("#1 String", "#2 String"), "Quality", _PAIR, ("not_equivalent", "equivalent"), ("accuracy", "f1")
    ),
    "qqp": _Layout(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        ("question1", "question2"),
        ("not_duplicate", "duplicate"),
        ("accuracy", "f1"),
    ),
    "stsb": _Layout("STS-B", _PAIR, "score", _PAIR, metrics=("pearson", "spearman")),
    "mnli": _Layout(
        "MNLI",
        _PAIR,
        "gold_label",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        parts=("matched", MISMATCHED),
    ),
    "qnli": _Layout("QNLI", ("question", "sentence"), "label", ("question", "sentence"), _ENTAILMENT),
    "rte": _Layout("RTE", _PAIR, "label", _PAIR, _ENTAILMENT),
    "wnli": _Layout("WNLI", _PAIR, "label", _PAIR, _ENTAILMENT[::-1]),
}


def cola(path: str | None) -> Task:
    """CoLA: is a sentence grammatical? Matthews correlation."""
    return _task("cola", path)


def sst2(path: str | None) -> Task:
    """SST-2: does a sentence of a film review praise? Accuracy."""
    return _task("sst2", path)


def mrpc(path: str | None) -> Task:
    """MRPC: do two sentences of the news say the same? Accuracy and F1."""
    return _task("mrpc", path)


def qqp(path: str | None) -> Task:
    """QQP: do two questions ask the same? Accuracy and F1."""
    return _task("qqp", path)


def stsb(path: str | None) -> Task:
    """STS-B: how similar are two sentences, from 0 to 5? Pearson and Spearman correlation."""
    return _task("stsb", path)


def mnli(path: str | None) -> Task:
    """MNLI: does a text entail a sentence, contradict it, or neither? Accuracy, matched and mismatched."""
    return _task("mnli", path)


def qnli(path: str | None) -> Task:
    """QNLI: does a sentence answer a question? Accuracy."""
    return _task("qnli", path)


def rte(path: str | None) -> Task:
    """RTE: does a text entail a sentence? Accuracy."""
    return _task("rte", path)


def wnli(path: str | None) -> Task:
    """WNLI: does a text entail a sentence in which its pronoun is replaced? Accuracy."""
    return _task("wnli", path)


def _task(name: str, path: str | None) -> Task:
    layout = _LAYOUTS[name]
    if folder := named_folder(f"glue/{name}", path, f"glue/{layout.folder}"):
        if (inside := folder / layout.folder).is_dir():  # the folder of all nine
            folder = inside
        parts = {part: partial(_rows, layout, file) for part, file in _files(layout, folder).items()}
        if not parts:
            raise UsageError(f"{folder} has none of the files of glue/{name}: expected train.tsv, dev.tsv and test.tsv")
    else:
        parts = {part: partial(_hub_rows, name, layout, hub) for part, hub in _hub_splits(layout).items()}
    return Task(f"glue/{name}", parts, layout.labels, layout.metrics)


def _part(split: str, part: str) -> str:
    """The name of a part of a split; the matched one is the split itself."""
    return f"{split}_{part}" if part == MISMATCHED else split


def _files(layout: _Layout, folder: Path) -> dict[str, Path]:
    """The files of a folder by part: "dev_mismatched.tsv.xz" is that of "valid_mismatched"."""
    there = {unpacked_name(file): file for file in listed(folder)}
    found = {}
    for split, word in zip(SPLITS, ("train", "dev", "test"), strict=True):
        for part in layout.parts if split != "train" else ("",):
            if file := there.get(f"{word}_{part}.tsv" if part else f"{word}.tsv"):
                found[_part(split, part)] = file
    return found


def _hub_splits(layout: _Layout) -> dict[str, str]:
    parts = [("train", "")] + [(split, part) for split in ("valid", "test") for part in layout.parts]
    return {_part(split, part): HUB_SPLITS[split] + (f"_{part}" if part else "") for split, part in parts}


def _rows(layout: _Layout, file: Path) -> Iterator[Example]:
    """The examples of an official file; rows that lack columns, of which QQP has a few, are left out."""
    rows = read_tsv(file)
    named = layout.header is None or unpacked_name(file).startswith("test")
    columns = next(rows, (1, []))[1] if named else list(layout.header or ())
    texts = [columns.index(column) for column in layout.columns if column in columns]
    if len(texts) < len(layout.columns):
        raise UsageError(f"{file} has the columns {', '.join(columns)}: expected {', '.join(layout.columns)}")
    label = columns.index(layout.label) if layout.label in columns else None
    short = 0
    for number, values in rows:
        if len(values) < len(columns):
            short += 1
            continue
        told = None if label is None else values[label]
        where = f"{file}, line {number}"
        first, *second = (values[place] for place in texts)
        pair = second[0] if second else None
        yield Example(f"{unpacked_name(file)}:{number}", first, pair, read_label(told, layout.labels, where))
    if short:
        log.warning("%s: %d rows lack columns and are left out", file, short)


def _hub_rows(name: str, layout: _Layout, split: str) -> Iterator[Example]:
    rows = paper_rows(f"glue/{name}", "nyu-mll/glue", name, split=split)
    for number, row in enumerate(rows):
        told = None if row["label"] == -1 else row["label"]  # -1 is how the hub keeps a label to itself
        first, *second = (row[column] for column in layout.hub_columns)
        pair = second[0] if second else None
        yield Example(f"{split}:{number}", first, pair, read_label(told, layout.labels, f"glue/{name}, {split}"))
