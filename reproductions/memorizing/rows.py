"""Rows of the paper's tables: models that read documents in order, with memories of several sizes or without."""

from __future__ import annotations

from typing import Any

from tables.harness import Row
from tables.models import Trained

CORPORA = ("arXiv", "PG19", "C4", "GitHub", "Isabelle")

PLAIN = Trained("plain", "documents")


def memorizing(size: str, start: Trained | None = None, **settings: Any) -> Trained:
    """A model with an attention memory of a size that the settings name."""
    return Trained(f"memory-{size}", "documents", attention={"size": size, **settings}, start=start)


def by_corpus(label: str, trained: Trained, variant: str, *figures: float | None) -> list[Row]:
    """A row of a table with a column for each corpus: a measurement of its own in each."""
    return [
        Row(label, trained, None, {corpus: figure}, f"{corpus}+{variant}" if variant else corpus)
        for corpus, figure in zip(CORPORA, figures, strict=True)
    ]
