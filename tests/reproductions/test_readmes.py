"""The tables in the READMEs of all papers are those of the results that stand beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.reproductions.runner import HERE, imported

ROWS = sorted(str(path.parent.relative_to(HERE)) for path in HERE.glob("*/*/run.py"))


@pytest.mark.parametrize("row", ROWS)
def test_what_a_readme_shows_is_what_was_measured(row: str, tmp_path: Path) -> None:
    folder, copy = HERE / row, tmp_path / "row"
    if not (folder / "results" / "small.json").exists():
        assert "Not run yet" in (folder / "README.md").read_text()
        return
    shutil.copytree(folder, copy)
    imported(folder / "run.py").table(copy, "small")
    assert (copy / "README.md").read_text() == (folder / "README.md").read_text()
