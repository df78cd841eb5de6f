"""Settings of the memory tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

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
    pool: bool = option(
        False,
        "label a whole text by the maximum and the mean of the [mem] tokens' outputs, through a new layer, instead of "
        "by [CLS] (the paper's +pool); for encoders with a head for sequence classification",
    )

    def check(self) -> None:
        if self.count < 1:
            raise UsageError(f"MemoryTokens.count = {self.count}: expected 1 or more")

    @classmethod
    def small(cls, layers: int) -> Self:
        return cls(count=4)

    def neutral(self) -> Self:
        return dataclasses.replace(self, gated=True, pool=False)  # a new head cannot say what the old one did

    def for_keys(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_dict().items() if name != "pool"}
