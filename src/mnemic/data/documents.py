"""Documents, and the corpora that give them split by split."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

from mnemic.errors import UsageError, unknown_name

SPLITS = ("train", "valid", "test")
WHOLE = "all"
SPLIT_WORDS = {split: split for split in SPLITS} | dict.fromkeys(("validation", "val", "dev"), "valid")

_TRAIN_SHARE, _VALID_SHARE = 0.90, 0.05


@dataclasses.dataclass(frozen=True)
class Document:
    """One text that belongs together: a book, an article, a repository."""

    id: str
    text: str

    def __post_init__(self) -> None:
        """Refuses a text that no file can hold: half of a surrogate pair, as JSON can write it."""
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"document {self.id!r} has a lone surrogate, {self.text[error.start]!r}, at character {error.start} "
                "of its text: mend it or leave it out"
            ) from None


Reader = Callable[[], Iterable[Document]]


class Corpus:
    """Documents by split, read anew from their source at each call; only one document is in memory at a time.

    `whole` reads all of them, where that is not the splits one after the other: a split may be a part of a document.
    """

    def __init__(self, name: str, readers: Mapping[str, Reader], whole: Reader | None = None) -> None:
        self.name = name
        self._readers = readers
        self._whole = whole

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that this corpus has, in the order train, valid, test."""
        return tuple(split for split in SPLITS if split in self._readers)

    def documents(self, split: str) -> Iterator[Document]:
        """Iterates over the documents of a split, or of all of them ("all"); raises what is wrong with the first."""
        documents = _with_text(self._reader(split)())
        first = next(documents, None)
        if first is None:
            raise UsageError(
                f"the {split!r} split of {self.name} has no document: give it more text, take all of it where a split "
                "can be chosen ('all'), or divide it yourself into files or sub-folders named train, valid and test"
            )
        return chain([first], documents)

    def _reader(self, split: str) -> Reader:
        if split == WHOLE:
            return self._whole or (lambda: chain.from_iterable(map(self.documents, self.splits)))
        if split not in SPLIT_WORDS:
            raise unknown_name("split", split, (*SPLITS, WHOLE))
        split = SPLIT_WORDS[split]
        if split not in self._readers:
            raise UsageError(f"{self.name} has no {split!r} split: it has {', '.join(map(repr, self.splits))}")
        return self._readers[split]


def divided(name: str, read: Reader) -> Corpus:
    """A corpus that has no splits of its own, split 90/5/5.

    Several documents are split by a hash of their ids, so that a document stays in its split when others come or go;
    should none fall into train, the first one does. A single document is cut at line ends, in order.
    """
    return Corpus(name, {split: partial(_share, name, read, split) for split in SPLITS}, read)


def _share(name: str, read: Reader, split: str) -> Iterator[Document]:
    documents = _with_text(read())
    first, second = next(documents, None), next(documents, None)
    if first is None:
        raise UsageError(f"{name} is empty: it has no document with any text")
    if second is None:
        yield Document(first.id, _cut(first.text)[split])
        return
    promoted = None if any(_hashed_split(document.id) == "train" for document in read()) else first.id
    for document in chain([first, second], documents):
        if ("train" if document.id == promoted else _hashed_split(document.id)) == split:
            yield document


def _with_text(documents: Iterable[Document]) -> Iterator[Document]:
    """Leaves out documents that are empty or nothing but white space."""
    return (document for document in documents if document.text and not document.text.isspace())


def _hashed_split(id: str) -> str:
    share = int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
    if share < _TRAIN_SHARE:
        return "train"
    return "valid" if share < _TRAIN_SHARE + _VALID_SHARE else "test"


def _cut(text: str) -> dict[str, str]:
    """Cuts a text into 90/5/5 percent of its characters, each cut moved on to the next line end."""
    first = _line_end(text, int(len(text) * _TRAIN_SHARE))
    second = _line_end(text, int(len(text) * (_TRAIN_SHARE + _VALID_SHARE)))
    return {"train": text[:first], "valid": text[first:second], "test": text[second:]}


def _line_end(text: str, position: int) -> int:
    found = text.find("\n", max(position - 1, 0))
    return len(text) if found < 0 else found + 1
