"""The text around a row, read from the store itself: the rows beside it hold the tokens beside its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mnemic.errors import UsageError
from mnemic.stores.base import Ids, Rows, Source, Store

GAP = "…"
TOKENS_BEFORE, TOKENS_AFTER = 24, 12


@dataclass(frozen=True)
class Context:
    """A row's token, the word, with the text before and after it; "…" stands where rows are missing."""

    id: int
    source: Source
    position: int
    before: str
    word: str
    after: str

    def __str__(self) -> str:
        return f"{self.before}»{self.word}«{self.after}"


def contexts(
    store: Store, ids: Any, tokenizer: Any, before: int = TOKENS_BEFORE, after: int = TOKENS_AFTER
) -> list[Context]:
    """The text around each of these rows, `before` and `after` tokens of it.

    It is found where documents were added in their order, as a build adds them. What was left out, forgotten, or added
    elsewhere in the store shows as "…".
    """
    found = np.asarray(ids, np.int64)
    if not len(found):
        return []
    around = np.unique(np.concatenate([np.arange(max(0, id - before), id + after + 1) for id in found.tolist()]))
    pieces = [*surviving(store, around)]
    if not pieces:
        raise _no_row(int(found[0]))
    there = np.concatenate([piece for piece, _ in pieces])
    values = np.concatenate([rows.values for _, rows in pieces])
    places = [rows.references[number] for piece, rows in pieces for number in range(len(piece))]
    return [_context(id, there, values, places, tokenizer, before, after) for id in found.tolist()]


def surviving(store: Store, ids: Ids) -> Iterator[tuple[Ids, Rows]]:
    """Those of these rows that the store still has, in parts and in order."""
    if not len(ids):
        return
    try:
        yield ids, store.get(ids)
    except UsageError:
        if len(ids) > 1:
            middle = len(ids) // 2
            yield from surviving(store, ids[:middle])
            yield from surviving(store, ids[middle:])


def _context(
    id: int, there: Ids, values: Any, places: list[tuple[Source, int]], tokenizer: Any, before: int, after: int
) -> Context:
    at = int(np.searchsorted(there, id))
    if at == len(there) or there[at] != id:
        raise _no_row(id)
    source, position = places[at]
    tokens: dict[int, int] = {}
    for row in range(max(0, at - before), min(len(there), at + after + 1)):
        if places[row][0] == source and -before <= places[row][1] - position <= after:
            tokens[places[row][1]] = int(values[row])
    left, word, right = "", "", ""
    for run in _runs(sorted(tokens)):
        text = [tokens[place] for place in run]
        if position in run:
            more, word, right = _texts(tokenizer, text, position - run[0])
            left += GAP * (run[0] > 0) + more
        elif run[-1] < position:
            left += GAP * (run[0] > 0) + _decode(tokenizer, text)
        else:
            right += GAP + _decode(tokenizer, text)
    return Context(id, source, position, left, word, right + GAP * _goes_on(tokenizer, tokens[max(tokens)]))


def _no_row(id: int) -> UsageError:
    return UsageError(f"no row has the number {id}: it was deleted, or never committed")


def _runs(positions: list[int]) -> list[list[int]]:
    """Positions, in order, cut where some are missing."""
    runs: list[list[int]] = []
    for position in positions:
        if not runs or runs[-1][-1] != position - 1:
            runs.append([])
        runs[-1].append(position)
    return runs


def _goes_on(tokenizer: Any, last: int) -> bool:
    """Whether a document has more after its token `last`."""
    return last not in (tokenizer.eos_token_id, tokenizer.sep_token_id)


def _texts(tokenizer: Any, tokens: list[int], middle: int) -> tuple[str, str, str]:
    """The text of the tokens before `middle`, of this one, and of those after it.

    Each is what its tokens add to the text of those before: decoded alone, tokens lose the space before them.
    """
    shown = [_decode(tokenizer, tokens[:count]) for count in (middle, middle + 1, len(tokens))]
    left, word = _shared(shown[0], shown[1]), _shared(shown[1], shown[2])
    return (
        shown[2][:left].lstrip("\ufffd"),
        shown[2][left:word] or _decode(tokenizer, [tokens[middle]]),
        shown[2][word:],
    )


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _shared(start: str, whole: str) -> int:
    """How much of `start` is the beginning of `whole`: all but characters of which it has only some bytes."""
    same = (index for index, (one, other) in enumerate(zip(start, whole, strict=False)) if one != other)
    return next(same, min(len(start), len(whole)))
