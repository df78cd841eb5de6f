"""The runner of the reproductions, and each row's module, imported from their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "reproductions"


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"reproductions_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runner = imported(HERE / "run.py")  # makes `tables` known
