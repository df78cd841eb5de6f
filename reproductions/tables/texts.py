"""The texts of the tables: corpora as they are, or cut to size, and pairs that can be made anywhere."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any, Literal

from tables import facts

from mnemic.config import Config, option
from mnemic.data import SPLITS, Corpus, Document, open_corpus
from mnemic.data.pairs import ParallelCorpus

MADE = "numbers"  # a corpus that needs no files
DIGITS = {
    "de": ["null", "eins", "zwei", "drei", "vier", "fuenf", "sechs", "sieben", "acht", "neun"],
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
}
_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})
_TOKENS = re.compile(r"@[-,.]@|\w+|'\w+|[^\w\s]")


@dataclass(kw_only=True)
class Text(Config):
    """A corpus, and how much of it is read."""

    corpus: str = option(
        "",
        f"a corpus by name or path; made here: {MADE}, German and English digits, and {facts.NAME}, that are stated "
        "and asked for",
    )
    besides: list[str] = option([], "corpora whose train split is read after its own")
    style: Literal["own", "wikitext"] = option("own", "wikitext: spaces around punctuation, a paragraph on a line")
    documents: dict[str, int] = option({}, "documents of each split at most")
    characters: dict[str, int] = option({}, "characters of each of a split's documents at most")

    def open(self) -> Corpus:
        """The corpus."""
        return _open(json.dumps(self.to_dict()))


@cache
def _open(settings: str) -> Corpus:
    text = Text.from_dict(json.loads(settings))
    if text.corpus == MADE:
        sides = {split: {side: partial(_digits, split, side) for side in DIGITS} for split in SPLITS}
        return ParallelCorpus(MADE, sides, ("de", "en"))
    if text.corpus == facts.NAME:
        return facts.corpus()
    corpus = open_corpus(text.corpus)
    if text == Text(corpus=text.corpus):
        return corpus
    held: Any = cache(partial(_documents, corpus, text))  # what is cut fits into memory
    return Corpus(corpus.name, {split: partial(held, split) for split in corpus.splits})


def _documents(corpus: Corpus, text: Text, split: str) -> list[Document]:
    corpora = [corpus, *map(open_corpus, text.besides)] if split == "train" else [corpus]
    found = islice(chain.from_iterable(one.documents(split) for one in corpora), text.documents.get(split))
    shape = wikitext_style if text.style == "wikitext" else str
    return [Document(document.id, shape(document.text[: text.characters.get(split)])) for document in found]


def wikitext_style(text: str) -> str:
    """A text as WikiText writes it: a paragraph on a line, spaces around words and marks, "well @-@ known"."""
    lines = []
    for paragraph in re.split(r"\n\s*\n", text.translate(_QUOTES)):
        paragraph = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", paragraph)
        paragraph = re.sub(r"(?<=\d)([.,])(?=\d)", r" @\1@ ", paragraph)
        if words := _TOKENS.findall(paragraph):
            lines.append(f" {' '.join(words)} \n")
    return "".join(lines)


def _digits(split: str, language: str) -> Iterator[Document]:
    draw = random.Random(split)
    for number in range(24 if split == "train" else 6):
        words = [DIGITS[language][draw.randrange(10)] for _ in range(draw.randrange(3, 8))]
        yield Document(f"{split}.{language}:{number}", " ".join(words))
