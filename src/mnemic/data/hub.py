"""Corpora from the Hugging Face hub, streamed through `datasets`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from mnemic.data.documents import SPLIT_WORDS, Corpus, Document, divided
from mnemic.data.local import DATA
from mnemic.errors import MnemicError, UsageError

HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_HINT = "check the name and the connection, or give a local file or folder"
TEXT_COLUMNS = ("text", "content", "document", "article", "code", "body")


def hub_corpus(source: str) -> Corpus:
    """The corpus of "hf:<dataset>" or "hf:<dataset>:<config>"; one that has only a train split is divided 90/5/5."""
    dataset, _, config = source.removeprefix("hf:").partition(":")
    if not dataset:
        raise UsageError(f"{source!r} names no dataset: write hf:<dataset> or hf:<dataset>:<config>")
    with hub_errors(source, _HINT):
        import datasets

        names = datasets.get_dataset_split_names(dataset, config or None)
    readers = {
        SPLIT_WORDS[name]: partial(_documents, source, dataset, config or None, name)
        for name in names
        if name in SPLIT_WORDS
    }
    if not readers:
        raise UsageError(f"{source} has the splits {', '.join(names)}: expected one named train, validation or test")
    return divided(source, readers["train"]) if list(readers) == ["train"] else Corpus(source, readers)


def paper_rows(name: str, *arguments: Any, sort: list[str] | None = None, **options: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a paper's corpus; a table that must be sorted first is downloaded, others are streamed."""
    hint = f"check the connection, or give the corpus as path=, or as {name}/ in the folder that {DATA} names"
    with hub_errors(name, hint):
        import datasets

        rows = datasets.load_dataset(*arguments, streaming=sort is None, **options)
        yield from rows.sort(sort) if sort else rows


@contextlib.contextmanager
def hub_errors(source: str, hint: str) -> Iterator[None]:
    """Turns whatever the hub, the network or `datasets` raises (no common base class) into one sentence."""
    try:
        yield
    except MnemicError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(f"{source} could not be loaded from the Hugging Face hub ({reason}): {hint}") from error


def _documents(source: str, dataset: str, config: str | None, split: str) -> Iterator[Document]:
    column = None
    with hub_errors(source, _HINT):
        import datasets

        for number, row in enumerate(datasets.load_dataset(dataset, config, split=split, streaming=True)):
            column = column or _text_column(source, row)
            yield Document(str(row.get("id", number)), row[column] or "")


def _text_column(source: str, row: dict[str, Any]) -> str:
    """The column of texts: one with a usual name, else the only one that holds a string."""
    strings = [name for name, value in row.items() if isinstance(value, str)]
    found = [name for name in TEXT_COLUMNS if name in strings] or strings
    if not found or (len(strings) > 1 and found is strings):
        raise UsageError(
            f"{source} has the columns {', '.join(row)}: expected a text column named one of {', '.join(TEXT_COLUMNS)}"
        )
    return found[0]
