"""The corpora of Memorizing Transformers: books, papers, source code, proofs and web pages as long documents."""

from __future__ import annotations

import graphlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from mnemic.data.documents import SPLITS, Corpus, Document, divided
from mnemic.data.hub import HUB_SPLITS, paper_rows
from mnemic.data.local import (
    files_as_documents,
    files_under,
    is_jsonl,
    join,
    joined_rows,
    listed,
    local_corpus,
    named_folder,
)
from mnemic.data.reading import read_text
from mnemic.errors import UsageError

LONG = 4096
_TOKEN = re.compile(r"\w+|[^\w\s]")
_IMPORTS = re.compile(r"\btheory\s.*?\bimports\b(.*?)\b(?:begin|keywords)\b", re.DOTALL)


def pg19(path: str | None) -> Corpus:
    """PG-19, books of Project Gutenberg from before 1919: a book is a document."""
    if folder := named_folder("pg19", path, "gutenberg-books"):
        return local_corpus(folder, "pg19")
    return Corpus("pg19", {split: partial(_hub_books, split) for split in SPLITS})


def _hub_books(split: str) -> Iterator[Document]:
    for row in paper_rows("pg19", "emozilla/pg19", split=HUB_SPLITS[split]):
        yield Document(row["short_book_title"], row["text"])


def arxiv_math(path: str | None) -> Corpus:
    """Mathematics papers of arXiv in LaTeX: a paper is a document."""
    if folder := named_folder("arxiv-math", path, "latex-math"):
        return local_corpus(folder, "arxiv-math")
    return Corpus("arxiv-math", {split: partial(_hub_math, split) for split in SPLITS})


def _hub_math(split: str) -> Iterator[Document]:
    for file, row in _proof_pile("arxiv-math", "dev" if split == "valid" else split):
        if row["meta"].get("config") == "arxiv":
            yield Document(file, row["text"])


def github(path: str | None) -> Corpus:
    """Source code: a repository, its files joined in directory order, is a document.

    Locally a sub-folder is a repository (files that are not text are left out), or consecutive rows of a .jsonl file
    with the same "repo". From the hub: the Python files of codeparrot-clean, sorted by repository, divided by hash.
    """
    if folder := named_folder("github", path):
        return local_corpus(folder, "github", partial(_joined, key="repo", join_folder=_repository))
    return divided("github", _hub_repositories)


def _repository(folder: Path) -> str:
    return join(_text_or_nothing(file) for _, file in files_under(folder))


def _text_or_nothing(file: Path) -> str:
    """A file's text, nothing if it is an image or other binary, of which repositories are full."""
    try:
        return read_text(file)
    except UsageError:
        return ""


def _hub_repositories() -> Iterator[Document]:
    columns = ["repo_name", "path"]
    rows = paper_rows("github", "codeparrot/codeparrot-clean", split="train", sort=columns)
    for repository, files in groupby(rows, key=lambda row: row["repo_name"]):
        yield Document(repository, join(row["content"] for row in files))


def isabelle(path: str | None) -> Corpus:
    """Isabelle's Archive of Formal Proofs: an entry, its theories joined in the order of their imports, is a document.

    Locally a sub-folder is an entry, or consecutive rows of a .jsonl file with the same "entry". From the hub: the
    archive's files in proof-pile, divided anew by entry because there theories of one entry are in several splits.
    """
    if folder := named_folder("isabelle", path, "isabelle-afp"):
        return local_corpus(folder, "isabelle", partial(_joined, key="entry", join_folder=_entry))
    return divided("isabelle", _hub_entries)


def _entry(folder: Path) -> str:
    return _join_theories({name: read_text(file) for name, file in files_under(folder) if name.endswith(".thy")})


def _hub_entries() -> Iterator[Document]:
    """The archive is small enough (about 200 MB) to be gathered in memory before its entries are put in order."""
    entries: dict[str, dict[str, str]] = {}
    for part in ("train", "dev", "test"):
        for file, row in _proof_pile("isabelle", part):
            if file.startswith("formal/afp/") and file.endswith(".thy"):
                _, _, entry, name = file.split("/", 3)
                entries.setdefault(entry, {})[name] = row["text"]
    for entry, theories in sorted(entries.items()):
        yield Document(entry, _join_theories(theories))


def _join_theories(theories: dict[str, str]) -> str:
    """Joins theories, each after those of the same entry that it imports, else in the order of their names."""
    named = {Path(file).stem: file for file in sorted(theories)}
    order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for file in sorted(theories):
        header = _IMPORTS.search(theories[file])
        imported = re.findall(r"[\w'-]+(?=\"|\s|$)", header[1]) if header else []
        order.add(file, *(named[name] for name in imported if name in named and named[name] != file))
    try:
        files = list(order.static_order())
    except graphlib.CycleError:  # two theories of one name in different folders; names are the best order left
        files = sorted(theories)
    return join(theories[file] for file in files)


def c4(path: str | None) -> Corpus:
    """C4, web pages: only documents of 4096 tokens or more.

    Which documents those are must not depend on the tokenizer, so words and punctuation marks are counted: a subword
    tokenizer gives at least as many tokens.
    """
    if folder := named_folder("c4", path):
        return local_corpus(folder, "c4", _long_documents)
    return Corpus("c4", {split: partial(_hub_pages, split) for split in ("train", "valid")})


def is_long(text: str) -> bool:
    """Whether a text has at least 4096 words and punctuation marks."""
    return next(islice(_TOKEN.finditer(text), LONG - 1, None), None) is not None


def _long_documents(path: Path) -> Iterator[Document]:
    return (document for document in files_as_documents(path) if is_long(document.text))


def _hub_pages(split: str) -> Iterator[Document]:
    for row in paper_rows("c4", "allenai/c4", "en", split=HUB_SPLITS[split]):
        if is_long(row["text"]):
            yield Document(row["url"], row["text"])


def _joined(path: Path, key: str, join_folder: Callable[[Path], str]) -> Iterator[Document]:
    """Each sub-folder is a document; in a .jsonl file, consecutive rows with the same `key`; any other file is one."""
    for item in listed(path) if path.is_dir() else [path]:
        if is_jsonl(item):
            yield from joined_rows(item, key)
        elif item.is_dir():
            yield Document(item.name, join_folder(item))
        elif item == path:
            yield Document(item.name, read_text(item))


def _proof_pile(name: str, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """File name and row of proof-pile, whose rows differ too much for one schema: they are read as lines of text."""
    files = f"hf://datasets/hoskinson-center/proof-pile/{part}/*.jsonl.gz"
    for line in paper_rows(name, "text", data_files=files, split="train"):
        row = json.loads(line["text"])
        yield str(row["meta"].get("file", "")), row
