"""The tables and figures of Memory Transformer: each runs in its smoke setting."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import mnemic
from mnemic.errors import UsageError
from tests.reproductions.test_trime import HERE, imported, runner

from tables.finetuned import Encoder, TaskTable  # isort: skip
from tables.settings import Settings  # isort: skip

PAPER = HERE / "memory_transformer"
NAMES = sorted(path.parent.name for path in PAPER.glob("*/run.py"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the rows, with one folder of runs for all of them."""
    folder = tmp_path_factory.mktemp("reproductions")
    shutil.copytree(PAPER, folder / PAPER.name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    return folder


def run(root: Path, name: str) -> dict[str, Any]:
    runner.run(root, [PAPER.name, name, "smoke", "--runs", str(root / "runs")])
    return json.loads((root / PAPER.name / name / "results" / "smoke.json").read_text())


def test_the_rows_that_are_there_are_in_the_readme() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (PAPER / "README.md").read_text(), flags=re.MULTILINE)
    assert listed == ["table1", "table2", "table3", "table4", "table5", "figures"]
    assert set(NAMES) <= set(listed)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_readme_shows_is_what_was_measured(name: str, tmp_path: Path) -> None:
    folder = PAPER / name
    if not (folder / "results" / "small.json").exists():
        assert "Not run yet" in (folder / "README.md").read_text()
        return
    shutil.copytree(folder, tmp_path / name)
    imported(folder / "run.py").table(tmp_path / name, "small")
    assert (tmp_path / name / "README.md").read_text() == (folder / "README.md").read_text()


# -- Table 5 ---------------------------------------------------------------------------------------------------------


def test_encoders_learn_tasks_with_memory_tokens_and_are_labelled_by_cls_or_by_them(root: Path) -> None:
    results = run(root, "table5")
    table: TaskTable = imported(PAPER / "table5" / "run.py").TABLE
    measured = results["measurements"]
    assert list(measured) == [row.label for row in table.rows]
    for row in table.rows:
        for task, seeds in measured[row.label].items():
            figures = [figure(seeds["0"]["figures"]) for of, figure in table.columns.values() if of == task]
            assert figures
            assert all(math.isfinite(figure) for figure in figures)
        tuned = row.fine_tuned(Settings.read(PAPER / "table5" / "smoke.toml"), "glue/stsb", 0, root / "runs")
        memory = getattr(tuned.load(), "memory", None)
        assert (memory.configs if memory else []) == list(row.memories)
        if row.label.endswith("+pool"):
            assert memory.tokens.head.classifier.weight.shape == (1, 32)
    models = {seeds["0"]["model"] for tasks in measured.values() for seeds in tasks.values()}
    assert len(models) == 18  # six models on three tasks
    table.table(root / PAPER.name / "table5", "smoke")
    assert "Seeds: 0; the mean" in (root / PAPER.name / "table5" / "README.md").read_text()


@pytest.mark.parametrize("size", ["small", "paper"])
def test_settings_of_table_5_can_be_read(size: str) -> None:
    settings = Settings.read(PAPER / "table5" / f"{size}.toml")
    table: TaskTable = imported(PAPER / "table5" / "run.py").TABLE
    assert set(settings.tasks) <= {task for task, _ in table.columns.values()}
    assert len(settings.seeds) == {"small": 3, "paper": 5}[size]
    row = table.rows[2]
    for task in settings.tasks:
        tuned = row.fine_tuned(settings, task, 0, Path("runs"))
        assert isinstance(tuned.encoder, Encoder)
        options = {name: value for name, value in tuned.options.items() if name != "epochs"}
        mnemic.TrainConfig.from_dict(options)


def test_an_encoder_that_is_not_known_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown pretrained encoder 'smollm2-135m'.*minilm"):
        Encoder(Settings(model="pretrained:smollm2-135m"), tmp_path).load()
