"""Corpora from files and folders."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from mnemic.data.documents import SPLIT_WORDS, Corpus, Document, Reader, divided
from mnemic.data.reading import read_rows, read_text, unpacked_name
from mnemic.errors import UsageError

DATA = "MNEMIC_DATA"

Rule = Callable[[Path], Iterator[Document]]
"""What a document is: turns a file or a folder into documents."""


def local_corpus(path: Path, name: str, rule: Rule | None = None) -> Corpus:
    """The corpus in a file or folder; by default each text file and each line of a .jsonl file is a document.

    A folder with sub-folders or files named train, valid (validation, val, dev) or test has its own splits. A path that
    itself has one of the two names for evaluation is all of that split. Anything else is divided 90/5/5.
    """
    if not present(path):
        raise missing(path)
    read: Reader = partial(rule or files_as_documents, path)
    if path.is_dir() and (splits := _own_splits(path)):
        readers = {split: partial(_each, rule or files_as_documents, items) for split, items in splits.items()}
        return Corpus(name, readers, None if rule else read)
    own = _split_named(path)
    return Corpus(name, {own: read}) if own in ("valid", "test") else divided(name, read)


def files_under(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields (path relative to `path`, file) for each file of a folder, recursive and sorted.

    Hidden files and folders are left out, links to folders are not followed.
    """
    if not path.is_dir():
        yield path.name, path
        return
    for item in listed(path):
        if item.is_dir() and not item.is_symlink():
            yield from ((f"{item.name}/{inner}", file) for inner, file in files_under(item))
        elif item.is_file():
            yield item.name, item


def files_as_documents(path: Path) -> Iterator[Document]:
    """Each text file is a document, and each line of a .jsonl file."""
    for name, file in files_under(path):
        if is_jsonl(file):
            for number, row in read_rows(file):
                yield Document(str(row.get("id", f"{name}:{number}")), row["text"])
        else:
            text = read_text(file)
            if not text and file == path:
                raise UsageError(f"{path} is empty: give a file with text in it")
            yield Document(name, text)


def named_folder(name: str, path: str | None, *other_names: str) -> Path | None:
    """Where a named corpus lies: `path`, or the folder of that name in the one that MNEMIC_DATA names, or nowhere."""
    if path is not None:
        if not present(given := Path(path).expanduser()):
            raise missing(given)
        return given
    data = os.environ.get(DATA)
    candidates = [Path(data).expanduser() / folder for folder in (name, *other_names)] if data else []
    return next((candidate for candidate in candidates if present(candidate)), None)


def joined_rows(file: Path, key: str) -> Iterator[Document]:
    """Consecutive rows of a .jsonl file with the same `key` joined to one document; a row without it stands alone."""
    rows = ((str(row.get(key) or row.get("id", number)), row["text"]) for number, row in read_rows(file))
    for id, group in groupby(rows, key=lambda row: row[0]):
        yield Document(id, join(text for _, text in group))


def join(texts: Iterator[str]) -> str:
    """Texts one after the other, each on a line of its own."""
    return "".join(text if text.endswith("\n") or not text else text + "\n" for text in texts)


def is_jsonl(file: Path) -> bool:
    """Whether a file, packed or not, is one of JSON lines."""
    return unpacked_name(file).endswith(".jsonl")


def present(path: Path) -> bool:
    """Whether there is such a file or folder; UsageError where that may not be known."""
    try:
        path.stat()
    except PermissionError:
        raise UsageError(f"no permission to read {path}: change its rights or take another path") from None
    except (OSError, ValueError):  # not there, or no possible name at all
        return False
    return True


def missing(path: Path) -> UsageError:
    """The error for a path that does not exist: it suggests the nearest name in the deepest folder that does."""
    parent = path.parent
    while not os.path.isdir(parent) and parent != parent.parent:
        path, parent = parent, parent.parent
    try:
        near = difflib.get_close_matches(path.name, os.listdir(parent), n=1, cutoff=0.5)
    except OSError:
        near = []
    return UsageError(f"no such file or folder: {path}" + (f"; did you mean {parent / near[0]}?" if near else ""))


def listed(folder: Path) -> list[Path]:
    """The items of a folder, sorted; hidden ones left out."""
    try:
        return sorted(item for item in folder.iterdir() if not item.name.startswith("."))
    except PermissionError:
        raise UsageError(f"no permission to read {folder}: change its rights or take another folder") from None


def _own_splits(folder: Path) -> dict[str, list[Path]]:
    """The items of each split, if there is a train or nothing but splits: a lone `test` folder among others is none."""
    items = listed(folder)
    splits: dict[str, list[Path]] = {}
    for item in items:
        if split := _split_named(item):
            splits.setdefault(split, []).append(item)
    return splits if "train" in splits or len(items) == sum(map(len, splits.values())) else {}


def _split_named(path: Path) -> str | None:
    """The split that a name stands for: "train", "dev.jsonl.xz", "wiki.valid.tokens"."""
    return SPLIT_WORDS.get(path.name.removeprefix("wiki.").split(".")[0].lower())


def _each(rule: Rule, items: list[Path]) -> Iterator[Document]:
    for item in items:
        yield from rule(item)
