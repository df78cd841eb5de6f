"""The rows of a store that are nearest to the keys of contexts, searched for while the model goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mnemic.memories.output.config import OutputMemory

Rows = tuple[Tensor, Tensor, Tensor]
"""Similarities, values and mask (N, K) of the rows found for N keys."""


class SearchedStore(Protocol):
    """What the memory asks of a store: mnemic.stores.Store is one."""

    config: Any

    def search(self, queries: Any, k: int, where: Any = None, recall: float | None = None) -> Any:
        """The k nearest rows of each query: ids, scores, values and mask, (queries, k) each."""


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
    found = store.search(keys.detach().float().cpu().numpy(), config.k, config.namespaces or None, config.recall)
    scores, values, mask = (torch.from_numpy(t) for t in (found.scores, found.values, found.mask))
    if config.similarity == "dot":
        scores = scores / keys.shape[-1] ** 0.5
    return scores.to(keys), values.to(keys.device), mask.to(keys.device)
