"""Evaluation: figures in which each token counts exactly once."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "evaluate": "mnemic.evaluate.evaluation",
    "Result": "mnemic.evaluate.evaluation",
    "EvaluateConfig": "mnemic.evaluate.config",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
