"""SQuAD 1.1 (arXiv:1606.05250): questions about paragraphs of Wikipedia, each answered by words of its paragraph."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mnemic.data.hub import HUB_SPLITS, paper_rows
from mnemic.data.local import listed, named_folder
from mnemic.data.reading import read_text, unpacked_name
from mnemic.data.tasks import Answer, Example, Task
from mnemic.errors import UsageError

METRICS = ("exact_match", "f1")
_FILES = {"train": "train-v1.1.json", "valid": "dev-v1.1.json"}


def squad(path: str | None) -> Task:
    """SQuAD 1.1: which words of a paragraph answer a question? Exact match and F1."""
    if folder := named_folder("squad", path):
        there = {unpacked_name(file): file for file in listed(folder)} if folder.is_dir() else {}
        parts = {split: partial(_questions, there[name]) for split, name in _FILES.items() if name in there}
        if not parts:
            raise UsageError(f"{folder} has none of the files of squad: expected {' and '.join(_FILES.values())}")
    else:
        parts = {split: partial(_hub_questions, HUB_SPLITS[split]) for split in _FILES}
    return Task("squad", parts, metrics=METRICS, kind="spans")


def _questions(file: Path) -> Iterator[Example]:
    text = read_text(file)
    try:
        paragraphs = [paragraph for article in json.loads(text)["data"] for paragraph in article["paragraphs"]]
        for paragraph in paragraphs:
            for asked in paragraph["qas"]:
                answers = [Answer(answer["answer_start"], answer["text"]) for answer in asked["answers"]]
                yield Example(asked["id"], asked["question"], paragraph["context"], answers=tuple(answers))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is not a file of SQuAD 1.1 ({type(error).__name__}: {error})") from None


def _hub_questions(split: str) -> Iterator[Example]:
    for row in paper_rows("squad", "rajpurkar/squad", split=split):
        both = zip(row["answers"]["answer_start"], row["answers"]["text"], strict=True)
        answers = tuple(Answer(start, text) for start, text in both)
        yield Example(row["id"], row["question"], row["context"], answers=answers)
