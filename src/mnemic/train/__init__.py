"""Training: one loop, into which objectives, schedules and optimisers plug; exact resume from atomic checkpoints."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {"train": "mnemic.train.loop", "Run": "mnemic.train.run", "TrainConfig": "mnemic.train.config"}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
