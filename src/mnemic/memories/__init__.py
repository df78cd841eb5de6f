"""The four memories. Each folder here is one, with the same files; a new folder is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from mnemic.memories.config import MemoryConfig
from mnemic.registry import Registry


@cache
def registry() -> Registry:
    """Folder name -> the config class of that memory."""
    entries = {}
    for found in pkgutil.iter_modules(__path__):
        if found.ispkg:
            module = importlib.import_module(f"{__name__}.{found.name}.config")
            (config,) = (
                value
                for value in vars(module).values()
                if isinstance(value, type) and issubclass(value, MemoryConfig) and value.__module__ == module.__name__
            )
            entries[found.name] = f"{module.__name__}:{config.__name__}"
    return Registry("memory", entries)


def configs() -> dict[str, type[MemoryConfig]]:
    """Class name -> config class, for the public names of the package."""
    return {config.__name__: config for config in map(registry().load, registry())}
