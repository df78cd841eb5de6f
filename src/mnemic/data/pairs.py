"""Parallel corpora: texts with their translations.

A parallel corpus is a folder with a file for each split and language, plain or packed: train.de and train.en, val.de
and val.en, and so on. Line n of one file is the translation of line n of the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mnemic.data.documents import SPLIT_WORDS, SPLITS, Corpus, Document, Reader
from mnemic.data.hub import HUB_SPLITS, paper_rows
from mnemic.data.local import DATA, listed, local_corpus, named_folder, present
from mnemic.data.reading import lines_of, read_pieces, unpacked_name
from mnemic.errors import UsageError

# ISO 639-1: by these a folder is known as a parallel corpus; other suffixes have to be named, as in "folder:src-tgt"
_CODES = (
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en "
    "eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv "
    "ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne "
    "ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st "
    "su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)
LANGUAGES = frozenset(_CODES.split())
_DIRECTION = re.compile(r"(.+):(\w+)-(\w+)")

Languages = tuple[str, str]
"""Source and target."""


class Pair(NamedTuple):
    """A text and its translation."""

    source: Document
    target: Document


class ParallelCorpus(Corpus):
    """A corpus in two or more languages; its pairs go from the first of `languages` to the second.

    `sides` has a reader for each split and language; the documents of two languages belong together one by one. A pair
    of which a side is blank is left out. As a plain corpus its documents are the sources and targets in turn, which is
    what a joint tokenizer is trained on.
    """

    def __init__(self, name: str, sides: Mapping[str, Mapping[str, Reader]], languages: Languages) -> None:
        splits = [split for split in sides if set(languages) <= sides[split].keys()]
        if not splits:
            known = sorted({language for readers in sides.values() for language in readers})
            raise UsageError(
                f"{name} has nothing in both {languages[0]!r} and {languages[1]!r}: it has {', '.join(known)}"
            )
        super().__init__(name, {split: partial(self._in_turn, split) for split in splits})
        self.languages = languages
        self._sides = sides

    def between(self, source: str, target: str) -> ParallelCorpus:
        """The same corpus from and to these languages."""
        return ParallelCorpus(f"{self.name}:{source}-{target}", self._sides, (source, target))

    def pairs(self, split: str) -> Iterator[Pair]:
        """Iterates over the pairs of a split; only one of them is in memory at a time."""
        documents = self.documents(split)
        return map(Pair, documents, documents)  # takes the source, then the target

    def _in_turn(self, split: str) -> Iterator[Document]:
        both = (self._sides[split][language]() for language in self.languages)
        for number, sides in enumerate(zip_longest(*both), start=1):
            if None in sides:
                longer, shorter = self.languages if sides[1] is None else self.languages[::-1]
                raise UsageError(
                    f"the {split!r} split of {self.name} has {number - 1} lines in {shorter!r} and more in {longer!r}: "
                    "give files of which each line is the translation of the same line of the other"
                )
            if all(document.text and not document.text.isspace() for document in sides):
                yield from sides


def read_direction(source: str) -> tuple[str, Languages | None]:
    """The name of a corpus and the languages after it, if there are any: "multi30k:en-de"."""
    found = _DIRECTION.fullmatch(source)
    return (found[1], (found[2], found[3])) if found else (source, None)


def parallel_corpus(folder: Path, name: str, languages: Languages | None = None) -> ParallelCorpus | None:
    """The parallel corpus in a folder, or None if it holds none; without `languages`, in the order of the alphabet."""
    sides = _sides(folder, LANGUAGES.union(languages or ())) if present(folder) and folder.is_dir() else {}
    found = max((sorted(readers) for readers in sides.values()), key=len, default=[])
    if languages is None and len(found) > 2:
        raise UsageError(
            f"{folder} has files in {', '.join(found)}: say from which to which to translate, "
            f"as in {name}:{found[0]}-{found[1]}"
        )
    if len(found) < 2 or not set(languages or found) <= set(found):
        return None
    return ParallelCorpus(name, sides, languages or (found[0], found[1]))


def _sides(folder: Path, languages: frozenset[str]) -> dict[str, dict[str, Reader]]:
    """A reader for each split and language; of test_2016 and test_2017 the first is the test split, unless one is test.

    The name before the language is that of a split, or begins with it.
    """
    files: dict[str, dict[str, dict[str, Path]]] = {}
    for file in listed(folder):
        stem, _, language = unpacked_name(file).rpartition(".")
        split = SPLIT_WORDS.get(re.split(r"[._-]", stem.lower())[0])
        if split and language in languages and file.is_file():
            files.setdefault(split, {}).setdefault(stem.lower(), {})[language] = file
    chosen = {split: min(stems, key=lambda stem: (stem not in SPLIT_WORDS, stem)) for split, stems in files.items()}
    return {
        split: {language: partial(_lines, file) for language, file in files[split][stem].items()}
        for split, stem in chosen.items()
    }


def _lines(file: Path) -> Iterator[Document]:
    for number, line in enumerate(lines_of(read_pieces(file)), start=1):
        yield Document(f"{unpacked_name(file)}:{number}", line.strip())


def multi30k(path: str | None) -> Corpus:
    """Multi30k, descriptions of pictures in German and English: a pair of sentences is a pair of documents."""
    return _german_and_english("multi30k", path, "bentrevett/multi30k")


def wmt14(path: str | None) -> Corpus:
    """WMT-14, news and parliament in German and English: a pair of sentences is a pair of documents."""
    return _german_and_english("wmt14", path, "wmt/wmt14", "de-en")


def iwslt14(path: str | None) -> Corpus:
    """IWSLT'14, talks in German and English: a pair of sentences is a pair of documents."""
    return _german_and_english("iwslt14", path)


def _german_and_english(name: str, path: str | None, *dataset: str) -> Corpus:
    """The parallel corpus in the folder of that name, or else that data set of the hub, if there is one."""
    if folder := named_folder(name, path):
        return parallel_corpus(folder, name, ("de", "en")) or local_corpus(folder, name)
    sides = {
        split: {side: partial(_hub_sentences, name, split, side, dataset) for side in ("de", "en")} for split in SPLITS
    }
    return ParallelCorpus(name, sides, ("de", "en"))


def _hub_sentences(name: str, split: str, language: str, dataset: tuple[str, ...]) -> Iterator[Document]:
    if not dataset:
        raise UsageError(
            f"{name} is read from files train.de, train.en, valid.de, ..., test.en: give their folder as path=, or put "
            f"them in {name}/ in the folder that {DATA} names"
        )
    rows = paper_rows(name, *dataset, split=HUB_SPLITS[split])
    for number, row in enumerate(rows, start=1):
        yield Document(f"{split}.{language}:{number}", row.get("translation", row)[language].strip())
