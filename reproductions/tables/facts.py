"""Documents that state a fact once, at their beginning, and ask for it later: a text that needs no files.

    k3 v7 .  w4 w5 w6 w7 w8  ? k3 v7  w1 w2 w3 w4  ? k3 v7  ...

What stands between is easy to foretell: a model's loss is in the answers, and who has forgotten the fact cannot know
them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from mnemic.data import Corpus, Document

NAME = "facts"
KEYS, VALUES = [f"k{number}" for number in range(4)], [f"v{number}" for number in range(16)]
OTHERS = [f"w{number}" for number in range(12)]
FACTS = 1
DOCUMENTS = {"train": 20_000, "valid": 50}
LENGTHS = (16, 512)  # words of a document


def corpus() -> Corpus:
    """Documents of different lengths, in which some ask often and some hardly ever."""
    return Corpus(NAME, {split: partial(_documents, split) for split in DOCUMENTS})


def _documents(split: str) -> Iterator[Document]:
    draw = random.Random(split)
    for number in range(DOCUMENTS[split]):
        often, length = draw.random() ** 3, draw.randint(*LENGTHS)
        yield Document(f"{split}:{number}", " ".join(words(draw, length, often)))


def asked_once(segment: int, distance: int, count: int) -> Iterator[Document]:
    """Documents that state facts in their first segment and ask for all of them at the end of the one `distance` later.

    With a token before them they fill segments of so many tokens.
    """
    draw = random.Random(distance)
    for number in range(count):
        yield Document(f"{distance}:{number}", " ".join(words(draw, segment * (distance + 1) - 1, often=0.0)))


def words(draw: random.Random, length: int, often: float) -> list[str]:
    """The words of a document that asks so often between, and for all facts at its end."""
    facts = dict(zip(draw.sample(KEYS, FACTS), draw.choices(VALUES, k=FACTS), strict=True))
    found = [word for fact in facts.items() for word in fact] + ["."]
    end = [word for key in draw.sample(list(facts), FACTS) for word in ("?", key, facts[key])]
    while len(found) < length - len(end):
        at = draw.randrange(len(OTHERS))
        found += [OTHERS[(at + step) % len(OTHERS)] for step in range(draw.randrange(3, 8))]
        if draw.random() < often:
            key = draw.choice(list(facts))
            found += ["?", key, facts[key]]
    return found[: max(length - len(end), 0)] + end
