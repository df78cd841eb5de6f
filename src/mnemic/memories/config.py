"""The base of every memory's settings."""

from __future__ import annotations

from mnemic.config import Config


class MemoryConfig(Config):
    """Settings of one memory; the folder it lives in is the memory's name."""

    @classmethod
    def memory(cls) -> str:
        """The name of the memory: the folder under `memories/` that defines this class."""
        return cls.__module__.split(".")[-2]
