"""Names that stand for classes or functions, imported only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from mnemic.errors import unknown_name


class Registry:
    """Maps a name to "module:attribute"; nothing is imported until `load`."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def register(self, name: str, target: str) -> None:
        """Adds or replaces an entry; `target` is "module:attribute"."""
        self._entries[name] = target

    def load(self, name: str) -> Any:
        """Imports and returns what `name` stands for."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        module, _, attribute = self._entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
