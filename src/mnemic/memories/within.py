"""What holds for a memory only within a context, and only in the thread that entered it: others may use the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Within(Generic[Value]):
    """A value of a memory, by the object that it is of."""

    def __init__(self, name: str) -> None:
        self._values: ContextVar[dict[int, Value]] = ContextVar(f"mnemic_{name}")

    def get(self, owner: Any) -> Value | None:
        """The value, or None if there is none."""
        return self._values.get({}).get(id(owner))

    @contextlib.contextmanager
    def being(self, owner: Any, value: Value) -> Iterator[Value]:
        """Within this context it is `value`."""
        token = self._values.set({**self._values.get({}), id(owner): value})
        try:
            yield value
        finally:
            self._values.reset(token)
