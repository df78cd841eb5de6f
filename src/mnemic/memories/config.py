"""The base of every memory's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from mnemic.config import Config


def absolute(address: str | None) -> str | None:
    """The address of a store, as it is known from any working directory."""
    if address is None or ":" in address:  # a scheme
        return address
    return str(Path(address).expanduser().absolute())


@dataclass(kw_only=True)
class MemoryConfig(Config):
    """Settings of one memory; the folder it lives in is the memory's name."""

    starts: ClassVar[dict[str, dict[str, Any]]] = {}  # settings that go together, by a name: `--memory tokens.name`

    @classmethod
    def memory(cls) -> str:
        """The name of the memory: the folder under `memories/` that defines this class."""
        return cls.__module__.split(".")[-2]

    @classmethod
    def small(cls, layers: int) -> Self:
        """A small instance for a model of that many layers, as the demo, the self-check and the contract tests use."""
        return cls()

    def for_keys(self) -> dict[str, Any]:
        """The settings on which the hidden states of a model depend, before it has read anything else."""
        return self.to_dict()

    @property
    def cached(self) -> int:
        """How many tokens of earlier segments the model's KV cache is to hold beside this memory; 0: its own affair."""
        return 0

    def neutral(self) -> Self:
        """The same memory with a start that leaves the model's output as it was."""
        return self

    def saved(self) -> dict[str, Any]:
        """The settings as they are saved with a model, which may be loaded from another working directory."""
        return self.to_dict()
