"""mnemic gives a transformer a memory: in its input, its attention, its feed-forward layers or its output.

The public names are loaded on first use, so that `import mnemic` and `mnemic --help` need no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "augment": "mnemic.augment",
    "load": "mnemic.augment",
    "train": "mnemic.train",
    "TrainConfig": "mnemic.train.config",
    "evaluate": "mnemic.evaluate",
    "EvaluateConfig": "mnemic.evaluate.config",
    "open_corpus": "mnemic.data",
    "load_tokenizer": "mnemic.data",
    "train_tokenizer": "mnemic.data",
    "MnemicError": "mnemic.errors",
    "UsageError": "mnemic.errors",
    "UnsupportedModel": "mnemic.errors",
    "DamagedError": "mnemic.errors",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    from mnemic.memories import configs  # each folder of memories/ adds its config class to the public names

    if name in (found := configs()):
        return found[name]
    raise AttributeError(f"module 'mnemic' has no attribute {name!r}")


def __dir__() -> list[str]:
    from mnemic.memories import configs

    return sorted([*_PUBLIC, *configs(), "__version__"])
