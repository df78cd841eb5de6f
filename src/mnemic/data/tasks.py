"""Tasks: texts with answers to be learned, and the figures that say how well.

A task is one of GLUE's or SQuAD by name, or a folder of your own with files train.tsv and dev.tsv (or .jsonl, plain or
packed) that have the columns text and label, and for pairs of texts text_pair.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from mnemic.data.documents import SPLIT_WORDS, Corpus, Document
from mnemic.data.local import listed, missing, present
from mnemic.data.reading import lines_of, read_pieces, unpacked_name
from mnemic.errors import UsageError, unknown_name
from mnemic.registry import Registry

TASKS = Registry(
    "task",
    {
        "glue/cola": "mnemic.data.glue:cola",
        "glue/sst2": "mnemic.data.glue:sst2",
        "glue/mrpc": "mnemic.data.glue:mrpc",
        "glue/qqp": "mnemic.data.glue:qqp",
        "glue/stsb": "mnemic.data.glue:stsb",
        "glue/mnli": "mnemic.data.glue:mnli",
        "glue/qnli": "mnemic.data.glue:qnli",
        "glue/rte": "mnemic.data.glue:rte",
        "glue/wnli": "mnemic.data.glue:wnli",
        "squad": "mnemic.data.squad:squad",
    },
)
"""Name -> function(path | None) -> Task; the first line of its docstring says what is asked and what is measured."""

OWN = "task:"  # before a folder, where a corpus may stand as well

Kind = Literal["classification", "spans"]
"""What is learned: a label or a score of a text, or which words of a text answer a question."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Words of a text, and the character at which they begin."""

    start: int
    text: str


@dataclasses.dataclass(frozen=True)
class Example:
    """A text, or two, and what is to be learned of it; for spans the question, and the text in which its answer is."""

    id: str
    text: str
    pair: str | None = None
    label: float | None = None  # the number of a label, or a score; None where it is not told
    answers: tuple[Answer, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a text that no tokenizer takes, as Document does."""
        for text in (self.text, self.pair or ""):
            Document(self.id, text)


Examples = Callable[[], Iterable[Example]]


class Task(Corpus):
    """Examples by split; as a plain corpus, its documents are their texts.

    `labels` are the names of the labels, none if there is a score instead; `metrics` those of the figures. A split may
    come in several parts: "valid" and "valid_mismatched" are both of the valid split.
    """

    def __init__(
        self,
        name: str,
        parts: Mapping[str, Examples],
        labels: tuple[str, ...] = (),
        metrics: tuple[str, ...] = ("accuracy",),
        kind: Kind = "classification",
    ) -> None:
        super().__init__(name, {part: partial(self._texts, part) for part in parts})
        self.labels = labels
        self.metrics = metrics
        self.kind: Kind = kind
        self._parts = parts

    def examples(self, split: str) -> Iterator[Example]:
        """Iterates over the examples of a split, or of one part of it by its full name."""
        part = SPLIT_WORDS.get(split, split)
        if part not in self._parts:
            known = ", ".join(map(repr, self._parts))
            raise UsageError(f"{self.name} has no {part!r} split: it has {known}; add its file")
        examples = iter(self._parts[part]())
        first = next(examples, None)
        if first is None:
            raise UsageError(f"the {part!r} split of {self.name} has no example")
        return chain([first], examples)

    def parts(self, split: str) -> dict[str, str]:
        """The parts of a split: what sets a part apart, "" for the first -> its full name."""
        split = SPLIT_WORDS.get(split, split)
        names = [part for part in self._parts if part == split or part.startswith(split + "_")]
        return {part[len(split) + 1 :]: part for part in names} or {"": split}

    def _texts(self, part: str) -> Iterator[Document]:
        """Each text once, though several questions in a row may be about it."""
        before = None
        for example in self.examples(part):
            yield Document(example.id, example.text)
            if example.pair is not None and example.pair != before:
                yield Document(f"{example.id}:pair", example.pair)
            before = example.pair


def check_task(data: Any, kind: str, model: str) -> Task:
    """The task; UsageError if this is no task, or none for a model, named `model`, of this kind."""
    if not isinstance(data, Task):
        raise UsageError(
            f"{data.name} is not a task, as {model} learns: give one of {', '.join(TASKS)}, or task:<folder>"
        )
    if data.kind != kind:
        head = {"classification": "AutoModelForSequenceClassification", "spans": "AutoModelForQuestionAnswering"}
        raise UsageError(
            f"{data.name} is a task of {data.kind} and {model} is made for {kind}: "
            f"load the model with mnemic.with_head or {head[data.kind]}"
        )
    return data


def is_task(source: str) -> bool:
    """Whether what may name a corpus names a task."""
    return source in TASKS or source.startswith(OWN)


def open_task(source: str | Path, path: str | None = None) -> Task:
    """Opens a task: a name from `mnemic list tasks`, or a folder with train.tsv and dev.tsv, or .jsonl.

    A name is looked for at `path`, then in the folder that MNEMIC_DATA names, then on the hub.
    """
    name = str(source).removeprefix(OWN)
    if name in TASKS and str(source) == name:
        return TASKS.load(name)(path)
    if path is not None:
        raise UsageError(f"a path goes with the name of a task ({', '.join(TASKS)}), not with {str(source)!r}")
    folder = Path(name).expanduser()
    if not present(folder):
        raise missing(folder) if folder.parent.is_dir() and len(folder.parts) > 1 else unknown_name("task", name, TASKS)
    return own_task(folder, name)


def own_task(folder: Path, name: str) -> Task:
    """The task in a folder.

    Labels that are whole numbers from 0 are classes by number; other numbers are scores; anything else names a class.
    """
    files = {split: file for file in listed(folder) if (split := _split_of(file))} if folder.is_dir() else {}
    if not files:
        raise UsageError(f"{folder} is not a task: expected a folder with files such as train.tsv and dev.tsv")
    told = {str(row.get("label", "")) for file in files.values() for _, row in read_table(file)} - {"", "None"}
    if not told:
        raise UsageError(f"{folder} has no labels: expected the columns text and label")
    numbers = _numbers(told)
    if numbers and all(number >= 0 and number.is_integer() for number in numbers):
        labels = tuple(str(label) for label in range(int(max(numbers)) + 1))
    else:
        labels = () if numbers else tuple(sorted(told))
    parts = {split: partial(_own_examples, file, labels) for split, file in sorted(files.items())}
    return Task(name, parts, labels, ("accuracy",) if labels else ("pearson", "spearman"))


def _split_of(file: Path) -> str | None:
    stem, _, suffix = unpacked_name(file).partition(".")
    return SPLIT_WORDS.get(stem.lower()) if suffix in ("tsv", "jsonl") else None


def _numbers(told: set[str]) -> list[float]:
    """The labels as numbers; none if one of them is not."""
    try:
        return [float(label) for label in told]
    except ValueError:
        return []


def _own_examples(file: Path, labels: tuple[str, ...]) -> Iterator[Example]:
    for number, row in read_table(file):
        where, text, pair = f"{file}, line {number}", row.get("text"), row.get("text_pair")
        if not isinstance(text, str) or not isinstance(pair, str | None):
            raise UsageError(f"{where} has no text: expected the columns text, label and for pairs text_pair")
        yield Example(f"{unpacked_name(file)}:{number}", text, pair, read_label(row.get("label"), labels, where))


def read_label(value: Any, labels: tuple[str, ...], where: str) -> float | None:
    """The number of a label, given by number or by name, or a score if there are no labels; None for nothing."""
    if value is None or value == "":
        return None
    if value in labels:
        return labels.index(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not labels and math.isfinite(number):
        return number
    if labels and number.is_integer() and 0 <= number < len(labels):
        return int(number)
    expected = f"one of {', '.join(labels)}, or its number from 0" if labels else "a number"
    raise UsageError(f"{where} has the label {value!r}: expected {expected}")


def read_table(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line number and row of a .jsonl file, or of a .tsv file whose first line names its columns."""
    if unpacked_name(file).endswith(".tsv"):
        rows = read_tsv(file)
        _, columns = next(rows, (1, []))
        for number, values in rows:
            if len(values) != len(columns):
                raise UsageError(f"{file}, line {number} has {len(values)} columns: expected {len(columns)}")
            yield number, dict(zip(columns, values, strict=True))
        return
    for number, line in enumerate(lines_of(read_pieces(file)), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(f"{file}, line {number} is not a JSON object: expected one with text and label in it")
        yield number, row


def read_tsv(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields line number and values of each line of a file in which tabs separate them; quotes mean nothing there."""
    for number, line in enumerate(lines_of(read_pieces(file)), start=1):
        line = line.rstrip("\r\n")
        if line:
            yield number, line.removeprefix("\ufeff").split("\t")
