"""The tables and figures of Large Product Key Memory: each runs in its smoke setting."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mnemic.errors import UsageError
from tests.reproductions.runner import HERE, imported, runner

from tables.finetuned import FineTuned, TaskTable  # isort: skip
from product_keys.rows import MODELS  # isort: skip
from tables.models import Model  # isort: skip
from tables.settings import Settings  # isort: skip

PAPERS_OWN = {"table1", "table2", "table4", "table5", "table6", "table7", "figure2", "figure3", "figure4"}
NAMES = sorted(path.parent.name for path in HERE.glob("product_keys/*/run.py"))
TASK_TABLES = ("table4", "table5", "table6", "table7")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the rows, with one folder of runs for all of them."""
    folder = tmp_path_factory.mktemp("reproductions")
    ignored = shutil.ignore_patterns("results", "__pycache__")
    shutil.copytree(HERE / "product_keys", folder / "product_keys", ignore=ignored)
    return folder


def run(root: Path, name: str) -> dict[str, Any]:
    runner.run(root, ["product_keys", name, "smoke", "--runs", str(root / "runs")])
    return json.loads((root / "product_keys" / name / "results" / "smoke.json").read_text())


def test_all_rows_of_the_paper_are_there() -> None:
    assert set(NAMES) == PAPERS_OWN | {"editing", "options"}


def test_the_models_of_table_2_are_measured_with_their_usage(root: Path) -> None:
    results = run(root, "table2")
    table = imported(HERE / "product_keys" / "table2" / "run.py").TABLE
    measured = results["measurements"]
    assert len([key for key, seeds in measured.items() if seeds]) == 12  # six models on two texts
    for row in table.rows:
        if row.variant != "WT-103":
            figures = measured[table.key(row)]["0"]["figures"]
            assert set(figures) == set(row.paper)
            assert all(math.isfinite(figure) for figure in figures.values())
            assert all(0 < figure <= 1 for name, figure in figures.items() if name.startswith("top-1"))
    perplexities = {row.label: measured[table.key(row)]["0"]["figures"]["PG-19"] for row in table.rows[2::3]}
    assert len(set(perplexities.values())) == 6
    table.table(root / "product_keys" / "table2", "smoke")
    assert "not run" in (root / "product_keys" / "table2" / "README.md").read_text()  # WikiText-103


def test_each_option_is_measured_beside_a_memory_without_it(root: Path) -> None:
    measured = run(root, "options")["measurements"]
    table = imported(HERE / "product_keys" / "options" / "run.py").TABLE
    figures = {
        label: measured[f"{label}: PG-19"]["0"]["figures"]["PG-19"] for label in (row.label for row in table.rows)
    }
    assert len(set(figures.values())) == len(figures) == 7  # no option is without effect


@pytest.mark.parametrize("name", ["table1", "figure2", "figure3", "figure4"])
def test_what_is_no_table_of_models_runs_in_its_smoke_setting(root: Path, name: str) -> None:
    results, folder = run(root, name), root / "product_keys" / name
    imported(HERE / "product_keys" / name / "run.py").table(folder, "smoke")
    assert "Size: smoke" in (folder / "README.md").read_text()
    if name == "table1":
        counts = results["parameters"]
        assert counts["BERT-base"] < counts["BERT-base + PKM"] < counts["BERT-base + ResM"]
    elif name == "figure2":
        assert all(sum(slots) == 64 for found in results["stale"].values() for slots in found["layers"].values())
    elif name == "figure3":
        assert {len(curve) for curve in results["curves"].values()} == {4}
    else:
        assert len(results["apart"]) == 4
        assert all(0 <= one["iou"] <= 1 for layers in results["apart"].values() for one in layers.values())
    if name != "table1":
        assert (folder / "results" / "smoke.png").stat().st_size > 5000


@pytest.mark.parametrize("name", TASK_TABLES)
def test_tables_of_tasks_run_in_their_smoke_setting(root: Path, name: str) -> None:
    results = run(root, name)
    table: TaskTable = imported(HERE / "product_keys" / name / "run.py").TABLE
    assert list(results["measurements"]) == [row.label for row in table.rows]
    for row in table.rows:
        for task, seeds in results["measurements"][row.label].items():
            figures = [figure(seeds["0"]["figures"]) for of, figure in table.columns.values() if of == task]
            assert figures
            assert all(math.isfinite(figure) for figure in figures)
    table.table(root / "product_keys" / name, "smoke")
    assert "Seeds: 0" in (root / "product_keys" / name / "README.md").read_text()


def test_a_memory_that_is_fixed_stays_as_it_was(root: Path) -> None:
    settings = Settings.read(HERE / "product_keys" / "table5" / "smoke.toml")
    encoder = Model(MODELS["(f) + Init + ResM"], settings, 0, root / "runs")
    encoder.train()
    before = encoder.load().memory.product_keys.state_dict()
    for trainable, same in (("base", True), ("all", False)):
        after = FineTuned(encoder, "glue/cola", 0, trainable).load().memory.product_keys.state_dict()
        assert all((after[name] == before[name]).all() for name in before) == same


def test_a_part_that_is_not_there_is_told(root: Path) -> None:
    with pytest.raises(UsageError, match="--only nothing"):
        runner.run(root, ["product_keys", "table4", "smoke", "--runs", str(root / "runs"), "--only", "nothing"])


@pytest.mark.parametrize("name", sorted(PAPERS_OWN - {"table1"} | {"options"}))
@pytest.mark.parametrize("size", ["small", "paper"])
def test_settings_of_all_sizes_can_be_read(name: str, size: str) -> None:
    settings = Settings.read(HERE / "product_keys" / name / f"{size}.toml")
    assert settings.product_keys
    assert (name in TASK_TABLES or name == "figure4") == bool(settings.tasks)
    for trained in MODELS.values():
        assert Model(trained, settings, 0, Path("runs")).masked
