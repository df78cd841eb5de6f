"""The tables and figures of Memory Transformer: each runs in its smoke setting."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import mnemic
from mnemic.errors import UsageError
from tests.reproductions.runner import HERE, imported, runner

from tables import facts  # isort: skip
from tables.finetuned import Encoder, TaskTable  # isort: skip
from tables.harness import Measurement  # isort: skip
from tables.models import Model  # isort: skip
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


def test_all_rows_of_the_paper_are_there_and_in_the_readme() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (PAPER / "README.md").read_text(), flags=re.MULTILINE)
    assert listed == ["table1", "table2", "table3", "table4", "table5", "figures", "retrieval"]
    assert set(NAMES) == set(listed)


# -- Tables 1 to 3 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table1", "table2", "table3"])
def test_every_variant_is_trained_and_translates(name: str, root: Path) -> None:
    results = run(root, name)
    table = imported(PAPER / name / "run.py").TABLE
    small = [row for row in table.rows if row.variant in ("", "small")]
    measured = [results["measurements"][table.key(row)]["0"] for row in small]
    assert all(0 <= figure <= 100 for made in measured for figure in made["figures"].values())
    models = {made["model"] for made in measured}
    assert len(models) == {"table1": 9, "table2": 2, "table3": 11}[name]


@pytest.mark.parametrize(("size", "split"), [("paper", "valid"), ("small", "test"), ("smoke", "test")])
def test_the_papers_size_is_scored_on_validation_as_the_paper_does(size: str, split: str, root: Path) -> None:
    for name in ("table1", "table2", "table3"):
        table, settings = imported(PAPER / name / "run.py").TABLE, Settings.read(PAPER / name / f"{size}.toml")
        for row in (row for row in table.rows if settings.has(row.variant)):
            made = Measurement(table, row, settings.varied(row.variant), 0, root / "runs")
            assert made.splits() == [split]
            assert set(made.places.values()) == {f"{split}/bleu"}


def test_models_of_the_tables_have_the_memory_that_their_rows_say(root: Path) -> None:
    settings = Settings.read(PAPER / "table1" / "smoke.toml").varied("small")
    models = imported(PAPER / "table1" / "run.py").MODELS
    counted = {label: Model(trained, settings, 0, root / "runs") for label, trained in models.items()}
    assert len({model.identity for model in counted.values()}) == len(models)
    for label, model in counted.items():
        model.train()
        memory = getattr(model.load(), "memory", None)
        if label == "Transformer":
            assert memory is None
            continue
        *_, count = label.split()
        assert memory.tokens.config.count == int(count)
        kinds = {
            "MemTransformer": "plain",
            "MemCtrl": "control",
            "MemCtrl Shared": "control-shared",
            "MemBottleneck": "bottleneck",
            "MemBottleneck Skip": "bottleneck-skip",
        }
        assert memory.tokens.config.variant == kinds[label.removesuffix(f" {count}")]


def test_an_extended_memory_goes_on_from_the_smaller_one(root: Path) -> None:
    settings = Settings.read(PAPER / "table3" / "smoke.toml")
    rows = imported(PAPER / "table3" / "run.py").TABLE.rows
    trained = next(row.trained for row in rows if row.trained.tokens.get("count") == 10)
    grown = Model(trained, settings, 0, root / "runs")
    assert grown.start is not None
    grown.start.train()
    before, begun = grown.start.load(), grown.begun()
    assert len(begun.memory.tokens.layer.vectors) == 10
    assert torch.equal(begun.memory.tokens.layer.vectors[5:], before.memory.tokens.layer.vectors)


def test_a_model_without_memory_goes_on_as_long(root: Path) -> None:
    results = run(root, "table3")["measurements"]
    stages = [stage for stage in results if stage.startswith("no memory: ")]
    assert len(stages) == 4
    for stage in stages:
        without = results[stage]["0"]["training"]
        of_memory = results[stage.replace("no memory", "5 tokens throughout")]["0"]["training"]
        assert without["tokens"] == of_memory["tokens"]
        assert without["parameters"] < of_memory["parameters"]
    settings = Settings.read(PAPER / "table3" / "smoke.toml")
    longer = [row.trained for row in imported(PAPER / "table3" / "run.py").TABLE.rows if not row.trained.tokens]
    models = [Model(trained, settings, 0, root / "runs") for trained in longer]
    assert [len(model.folder.name.split("-on")) - 1 for model in models] == [0, 1, 2, 3]
    assert not any(hasattr(model.load(), "memory") for model in models)
    weights = [model.load().get_input_embeddings().weight for model in models]
    assert not any(torch.equal(one, other) for one, other in pairwise(weights))


def test_a_lesion_is_measured_with_the_tokens_that_are_left(root: Path) -> None:
    run(root, "table2")
    table = imported(PAPER / "table2" / "run.py").TABLE
    settings = Settings.read(PAPER / "table2" / "smoke.toml")
    for row in table.rows[:6]:
        measurement = Measurement(table, row, settings, 0, root / "runs")
        assert len(measurement.loaded().memory.tokens.layer.vectors) == row.count
    assert len({Measurement(table, row, settings, 0, root / "runs").identity for row in table.rows}) == 12


def test_attention_maps_are_drawn_and_summed_up(root: Path) -> None:
    results = run(root, "figures")
    assert {label: set(stacks) for label, stacks in results["layers"].items()} == {
        "MemTransformer 10": {"encoder", "cross"},
        "MemBottleneck 20": {"encoder", "cross"},
    }
    for stacks in results["layers"].values():
        assert len(stacks["encoder"]) == 2
        assert all(row["write"] + row["process"] == pytest.approx(1, abs=1e-5) for row in stacks["encoder"])
    assert all(row["read"] == pytest.approx(1) for row in results["layers"]["MemBottleneck 20"]["encoder"])
    settings = Settings.read(PAPER / "figures" / "paper.toml")
    variants = {label: variant for label, (_, variant) in imported(PAPER / "figures" / "run.py").MODELS.items()}
    layers = {label: settings.varied(variant).model_settings["encoder_layers"] for label, variant in variants.items()}
    assert layers == {"MemTransformer 10": 6, "MemBottleneck 20": 4}  # as in the paper
    folder = root / PAPER.name / "figures"
    assert len(list((folder / "results").glob("*.png"))) == 6
    imported(PAPER / "figures" / "run.py").table(folder, "smoke")
    assert "| MemTransformer 10 | cross | 0 |  |  | 0." in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "table4"])
@pytest.mark.parametrize("size", ["small", "paper"])
def test_settings_can_be_read(name: str, size: str) -> None:
    settings = Settings.read(PAPER / name / f"{size}.toml")
    rows = [row for row in imported(PAPER / name / "run.py").TABLE.rows if settings.has(row.variant)]
    models = [Model(row.trained, settings.varied(row.variant), 0, Path("runs")) for row in rows]
    assert all((model.memory is None) == (not row.trained.tokens) for model, row in zip(models, rows, strict=True))


# -- Table 4 ---------------------------------------------------------------------------------------------------------


def test_transformer_xl_reads_memory_at_fixed_and_at_relative_positions(root: Path) -> None:
    results = run(root, "table4")
    figures = {label: seeds["0"]["figures"]["perplexity"] for label, seeds in results["measurements"].items()}
    assert list(figures) == ["Transformer-XL", "+ 20 mem, fixed", "+ 20 mem, relative"]
    assert len(set(figures.values())) == 3
    assert all(1 < figure < 1000 for figure in figures.values())


# -- Retrieval -------------------------------------------------------------------------------------------------------


def test_facts_are_asked_for_after_so_many_segments(root: Path) -> None:
    results = run(root, "retrieval")
    assert list(results["measurements"]) == list(imported(PAPER / "retrieval" / "run.py").MODELS)
    assert all(0 <= share <= 1 for seeds in results["measurements"].values() for share in seeds["0"]["right"].values())
    assert run(root, "retrieval") == results  # nothing is measured again
    for distance in (0, 1, 7):
        for document in facts.asked_once(32, distance, 5):
            words, first, last = document.text.split(), 2 * facts.FACTS, 3 * facts.FACTS
            assert len(words) == 32 * (distance + 1) - 1
            stated = dict(zip(words[0:first:2], words[1:first:2], strict=True))
            asked = dict(zip(words[1 - last :: 3], words[2 - last :: 3], strict=True))
            assert asked == stated
            assert not any(word[0] in "kv?" for word in words[first:-last])
    drawn = [document.text.split() for document in islice(facts.corpus().documents("train"), 200)]
    assert min(map(len, drawn)) >= facts.LENGTHS[0]
    assert max(map(len, drawn)) <= facts.LENGTHS[1]
    asking = sum(words.count("?") > facts.FACTS + 2 for words in drawn) / 200
    assert 0.2 < asking < 0.95  # some ask again and again, and some only at the end


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
