"""A search of a store that goes on while the model does."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

Rows = tuple[Tensor, Tensor, Tensor]
"""Similarities, values and mask (N, K) of the rows found for N keys."""


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
