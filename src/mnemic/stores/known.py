"""Whether a store has a text: documents are recognised by their tokens, since names say little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemic.stores.base import Ids, Rows, Source, Store
from mnemic.stores.context import surviving

BLOCK = 4096  # rows looked at in one go
PIECE = 32  # tokens that are looked for at once
SHORTEST = 8  # tokens; fewer may follow one another anywhere
KNOWN = 0.9  # share of a document's pieces from which on a store has the document
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, of the pieces' checksums


def all_rows(store: Store) -> Iterator[tuple[Ids, Rows]]:
    """All rows of a store, block by block and in order, with their numbers."""
    for first in range(0, store.next_id, BLOCK):
        yield from surviving(store, np.arange(first, min(first + BLOCK, store.next_id)))


def documents_in(store: Store, corpus: Any) -> set[int]:
    """The numbers of those documents of a tokenised corpus that a store has, whole or as a part of another one.

    It has a document if nearly all pieces of its text follow one another somewhere in its rows, or if all rows that it
    has under that name agree with the text: rows may have been left out between them.
    """
    texts = [corpus.slice(number, 1, corpus.length(number) - 1) for number in range(len(corpus))]
    named, pieces = _Named([corpus.id(number) for number in range(len(corpus))], texts), _Pieces(texts)
    for _, rows in all_rows(store):
        named.look_at(rows)
        pieces.look_at(rows)
    return named.known() | pieces.known()


class _Named:
    """Documents that a store has under their name, some rows of them or all."""

    def __init__(self, names: list[str], texts: list[NDArray[np.int64]]) -> None:
        self._texts, self._agree = texts, dict[tuple[int, Source], bool]()
        self._numbers: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            self._numbers.setdefault(name, []).append(number)

    def look_at(self, rows: Rows) -> None:
        for which in np.unique(rows.references.which).tolist():
            source, here = rows.references.sources[which], rows.references.which == which
            positions, values = rows.references.positions[here], rows.values[here]
            for number in self._numbers.get(source.document, ()):
                same = _agrees(self._texts[number], positions, values)
                self._agree[number, source] = self._agree.get((number, source), True) and same

    def known(self) -> set[int]:
        return {number for (number, _), same in self._agree.items() if same}


def _agrees(text: NDArray[np.int64], positions: NDArray[np.int64], values: NDArray[np.int64]) -> bool:
    """Whether these rows are of this text; the row after its last token, which ends a document, says nothing."""
    inside = positions < len(text)
    return bool((positions <= len(text)).all() and (text[positions[inside]] == values[inside]).all())


class _Pieces:
    """Documents whose text follows one another in a store's rows, under any name."""

    def __init__(self, texts: list[NDArray[np.int64]]) -> None:
        self._sums = [_sums_of_pieces(text) for text in texts]
        self._wanted = {
            size: np.unique(np.concatenate([sums for other, sums in self._sums if other == size]))
            for size in {size for size, _ in self._sums if size}
        }
        self._found: dict[int, set[int]] = {size: set() for size in self._wanted}
        self._before = np.empty(0, np.int64)

    def look_at(self, rows: Rows) -> None:
        values = np.concatenate([self._before, rows.values])
        for size, wanted in self._wanted.items():
            sums = _checksums(values, size)
            self._found[size].update(sums[np.isin(sums, wanted)].tolist())
        self._before = values[-(PIECE - 1) :]

    def known(self) -> set[int]:
        shares = {
            number: np.mean([one in self._found[size] for one in sums.tolist()])
            for number, (size, sums) in enumerate(self._sums)
            if size
        }
        return {number for number, share in shares.items() if share >= KNOWN}


def _sums_of_pieces(text: NDArray[np.int64]) -> tuple[int, NDArray[np.uint64]]:
    """The length of a text's pieces, 0 if it is too short, and their checksums; the last two may overlap."""
    size = min(PIECE, len(text))
    if size < SHORTEST:
        return 0, np.empty(0, np.uint64)
    starts = np.unique(np.append(np.arange(0, len(text) - size + 1, size), len(text) - size))
    return size, _checksums(text, size)[starts]


def _checksums(tokens: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
    """A checksum of each `size` tokens that follow one another."""
    count = max(len(tokens) - size + 1, 0)
    sums = np.zeros(count, np.uint64)
    for place in range(size if count else 0):
        sums = sums * FACTOR + tokens[place : place + count].astype(np.uint64)
    return sums
