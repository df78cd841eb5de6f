"""The corpora made from Wikipedia: WikiText-2, WikiText-103 and enwik8."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from mnemic.data.documents import SPLITS, Corpus, Document
from mnemic.data.hub import HUB_SPLITS, paper_rows
from mnemic.data.local import files_as_documents, files_under, is_jsonl, local_corpus, named_folder
from mnemic.data.reading import lines_of, read_pieces
from mnemic.errors import DamagedError, UsageError

ENWIK8_SHA1 = "57b8363b814821dc9d47aa4d41f58733519076b2"
ENWIK8_BYTES = {"train": (0, 90_000_000), "valid": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)}


def wikitext_2(path: str | None) -> Corpus:
    """WikiText-2, 2M words of Wikipedia: an article is a document (600/60/60)."""
    return _wikitext("wikitext-2", path)


def wikitext_103(path: str | None) -> Corpus:
    """WikiText-103, 103M words of Wikipedia: an article is a document."""
    return _wikitext("wikitext-103", path)


def _wikitext(name: str, path: str | None) -> Corpus:
    if folder := named_folder(name, path):
        return local_corpus(folder, name, _articles_under)
    return Corpus(name, {split: partial(_hub_articles, name, split) for split in SPLITS})


def _articles_under(path: Path) -> Iterator[Document]:
    for _, file in files_under(path):
        yield from files_as_documents(file) if is_jsonl(file) else articles(lines_of(read_pieces(file)))


def _hub_articles(name: str, split: str) -> Iterator[Document]:
    rows = paper_rows(name, "Salesforce/wikitext", f"{name}-v1", split=HUB_SPLITS[split])
    # The hub's rows are lines; it has emptied the blank ones, which are " \n" in the original files.
    return articles(row["text"] or " \n" for row in rows)


def articles(lines: Iterable[str]) -> Iterator[Document]:
    """Splits WikiText into articles: one starts at a line ` = Title = ` between two blank lines.

    Without the blank lines 31 table rows and formulas of WikiText-2 would pass for titles. No line is lost: what
    stands before the first title belongs to the first article.
    """
    title, article, previous, before = "", [""], "", ""
    for line in chain(lines, [""]):
        if not line.strip() and not before.strip() and _is_title(previous):
            if title:
                yield Document(title, "".join(article))
                article = []
            title = previous.strip()[2:-2]
        article.append(previous)
        before, previous = previous, line
    yield Document(title or "untitled", "".join(article))


def _is_title(line: str) -> bool:
    line = line.strip()
    return len(line) > 4 and line[:2] == "= " and line[-2:] == " =" and line[2] != "="


def enwik8(path: str | None) -> Corpus:
    """The first 100 MB of a Wikipedia dump, for bytes: each split (90/5/5 million bytes) is one document.

    That is how the published bits per byte are measured: over the whole stretch of five million bytes, pages running
    into each other as in the dump.
    """
    folder = named_folder("enwik8", path)
    if folder is None:
        read: Callable[[], Iterable[str]] = _hub_enwik8
    elif file := next((file for name, file in files_under(folder) if file == folder or name[:6] == "enwik8"), None):
        read = partial(read_pieces, file)
    else:
        return local_corpus(folder, "enwik8")
    return Corpus("enwik8", {split: partial(_stretch, read, split) for split in SPLITS})


def _stretch(read: Callable[[], Iterable[str]], split: str) -> Iterator[Document]:
    start, stop = ENWIK8_BYTES[split]
    position, parts = 0, []
    for piece in read():
        data = piece.encode()
        parts.append(data[max(start - position, 0) : max(stop - position, 0)])
        position += len(data)
        if position >= stop:
            break
    if position < stop:
        raise UsageError(f"enwik8 has 100,000,000 bytes, this file ended after {position:,}: get the whole file")
    yield Document(f"enwik8/{split}", b"".join(parts).decode())


def _hub_enwik8() -> Iterator[str]:
    """enwik8 is the start of enwik9, which the hub has as a table of lines; the published checksum settles it."""
    left, parts = ENWIK8_BYTES["test"][1], []
    for row in paper_rows("enwik8", "haukur/enwik9", split="train"):
        parts.append((row["text"].removesuffix("\n") + "\n").encode()[:left])
        left -= len(parts[-1])
        if not left:
            break
    data = b"".join(parts)
    if hashlib.sha1(data).hexdigest() != ENWIK8_SHA1:
        raise DamagedError("the hub's copy of enwik8 is not the published one: get the file and give its path")
    yield data.decode()
