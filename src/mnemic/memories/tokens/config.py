"""Settings of the memory tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from mnemic.config import option
from mnemic.errors import UsageError
from mnemic.memories.config import MemoryConfig


@dataclass(kw_only=True)
class MemoryTokens(MemoryConfig):
    """Trainable [mem] vectors before the input, which the sequence reads and writes (arXiv 2006.11527)."""

    count: int = option(10, "how many [mem] tokens are put before the input (the paper's m)")
    gated: bool = option(
        False, "give each token a trainable gate that starts closed: the model starts out exactly as its base"
    )

    def check(self) -> None:
        if self.count < 1:
            raise UsageError(f"MemoryTokens.count = {self.count}: expected 1 or more")

    @classmethod
    def small(cls, layers: int) -> Self:
        return cls(count=4)

    def neutral(self) -> Self:
        return dataclasses.replace(self, gated=True)
