"""Rows that several tables have: a way to train with the memory it is tested with."""

from __future__ import annotations

from tables.harness import CACHE, CACHE_LONG, KNN, KNN_CACHE, TRIME, TRIME_EXT, TRIME_LONG, Row, Testing
from tables.models import EXT, LOCAL, LONG, PLAIN, Trained

METHODS: dict[str, tuple[Trained, Testing | None]] = {
    "Transformer": (PLAIN, None),
    "+ continuous cache": (PLAIN, CACHE),
    "+ continuous cache, long-term": (PLAIN, CACHE_LONG),
    "kNN-LM": (PLAIN, KNN),
    "kNN-LM + continuous cache": (PLAIN, KNN_CACHE),
    "kNN-LM + continuous cache, long-term": (PLAIN, Testing(long=1, store="home", joint=False)),
    "TRIME": (LOCAL, TRIME),
    "TRIME long": (LONG, TRIME_LONG),
    "TRIME ext, without long": (EXT, Testing(store="home")),
    "TRIME ext": (EXT, TRIME_EXT),
}


def row(label: str, paper: dict[str, float | None], variant: str = "") -> Row:
    """The row of the method `label`, with the paper's figures by column."""
    return Row(label, *METHODS[label], paper, variant)


def dev_test(label: str, dev: float | None = None, test: float | None = None, **more: float) -> Row:
    """The row of a method with the paper's figures on the two splits."""
    return row(label, {"dev": dev, "test": test, **more})
