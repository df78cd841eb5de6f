"""The rows of a store that are nearest to the keys of contexts, searched for while the model goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemic.memories.output.config import OutputMemory

Rows = tuple[Tensor, Tensor, Tensor]
"""Similarities, values and mask (N, K) of the rows found for N keys."""

FEWEST = 32  # a token that fewer rows lead to is searched for


class SearchedStore(Protocol):
    """What the memory asks of a store: mnemic.stores.Store is one."""

    config: Any

    def search(self, queries: Any, k: int, where: Any = None, recall: float | None = None) -> Any:
        """The k nearest rows of each query: ids, scores, values and mask, (queries, k) each."""

    def score(self, queries: Any, ids: Any, where: Any = None) -> Any:
        """The same of given rows, (queries, k); a negative id stands for no row."""


class Search:
    """What `find` finds: at once, or in a thread of its own; then `result` waits for it."""

    def __init__(self, asked: Tensor, find: Callable[[], Rows | None], overlap: bool) -> None:
        self.asked = asked  # (B, T): the tokens that are searched for
        self._find, self._thread = find, None
        self._found: Rows | None = None
        self._error: BaseException | None = None
        if overlap:
            self._thread = threading.Thread(target=self._run, name="mnemic-search")
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._found = self._find()
        except BaseException as error:
            self._error = error

    def result(self) -> Rows | None:
        """What was found; None without a store."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


def nearest(store: SearchedStore, config: OutputMemory, keys: Tensor) -> Rows:
    """The k rows that are nearest to each of keys (N, d)."""
    found = store.search(_vectors(keys), config.k, config.namespaces or None, config.recall)
    return _rows(found, config, keys)


def followed(store: SearchedStore, config: OutputMemory, keys: Tensor, asked: Tensor, targets: Tensor) -> Rows:
    """Rows for the keys (B, T, d) of the tokens asked about (B, T): searched for, or those after the last token's.

    A row leads on if its value is the token that was read next, a target (B, T): the row after it in its text is likely
    near to the next key. Each stretch of tokens asked about begins with a search, and there is another after each
    `follow` tokens, and where too few rows lead on.
    """
    if not config.follow:
        return nearest(store, config, keys[asked])
    automaton = _Automaton(store, config, _vectors(keys[asked]), targets[asked].cpu().numpy())
    turns = _since_begin(asked) % (config.follow + 1)
    automaton.search(np.flatnonzero(turns == 0))
    for turn in range(1, turns.max(initial=0) + 1):
        automaton.search(automaton.follow(np.flatnonzero(turns == turn)))
    return _rows(automaton, config, keys)


class _Automaton:
    """The rows of N tokens, which lead to those of the tokens after them (RetoMaton, arXiv 2201.12431)."""

    def __init__(self, store: SearchedStore, config: OutputMemory, queries: Any, read: Any) -> None:
        self._store, self._config, self._queries, self._read = store, config, queries, read
        self._where = config.namespaces or None
        shape = len(queries), config.k
        self.ids, self.values = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.scores, self.mask = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)

    def search(self, tokens: NDArray[np.int64]) -> None:
        """Takes the nearest rows."""
        if len(tokens):
            found = self._store.search(self._queries[tokens], self._config.k, self._where, self._config.recall)
            self.ids[tokens], self.scores[tokens] = found.ids, found.scores
            self.values[tokens], self.mask[tokens] = found.values, found.mask

    def follow(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Takes the rows after those of the tokens before, best first; returns the tokens that have too few of them."""
        fewest, last = min(FEWEST, self._config.k), tokens - 1
        leads = self.mask[last] & (self.values[last] == self._read[last, None])
        able = leads.sum(1) >= fewest
        following = np.where(leads[able], self.ids[last[able]] + 1, -1)
        found = self._store.score(self._queries[tokens[able]], following, self._where)
        enough = found.mask.sum(1) >= fewest
        order = np.argsort(-found.scores[enough], axis=1)
        able[able] = enough
        for name in ("ids", "scores", "values", "mask"):
            getattr(self, name)[tokens[able]] = np.take_along_axis(getattr(found, name)[enough], order, 1)
        return tokens[~able]


def _since_begin(asked: Tensor) -> NDArray[np.int64]:
    """For each token asked about, (N,), how many before it in its row were asked about without a gap."""
    places = torch.arange(asked.shape[1], device=asked.device).expand_as(asked)
    last_gap = places.masked_fill(asked, -1).cummax(1).values
    return (places - last_gap - 1)[asked].cpu().numpy()


def _vectors(keys: Tensor) -> NDArray[np.float32]:
    return keys.detach().float().cpu().numpy()


def _rows(found: Any, config: OutputMemory, keys: Tensor) -> Rows:
    """What a store says, as the memory compares, on the device of the keys."""
    scores, values, mask = (torch.from_numpy(part) for part in (found.scores, found.values, found.mask))
    if config.similarity == "dot":
        scores = scores / keys.shape[-1] ** 0.5
    return scores.to(keys), values.to(keys.device), mask.to(keys.device)
