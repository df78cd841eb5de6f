"""The tables of the TRIME paper: each runs in its smoke setting, goes on where it stopped, and makes a README table."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from mnemic.cli.loading import read_new_model
from mnemic.errors import UsageError
from tests.reproductions.runner import HERE, imported, runner

from tables import harness, models, readme  # isort: skip
from tables.settings import Settings  # isort: skip
from tables.texts import Text, wikitext_style  # isort: skip

NAMES = sorted(path.parent.name for path in HERE.glob("trime/*/run.py"))
FIELDS = {"identity", "model", "figures", "tuned", "splits", "training", "seconds", "commit", "versions", "machine"}


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A copy of the tables, with one folder of runs for all of them."""
    folder = tmp_path_factory.mktemp("reproductions")
    shutil.copytree(HERE / "trime", folder / "trime", ignore=shutil.ignore_patterns("results", "__pycache__"))
    return folder


def run(root: Path, name: str, runs: str = "runs", *options: str) -> dict:
    runner.run(root, ["trime", name, "smoke", "--runs", str(root / runs), *options])
    return json.loads((root / "trime" / name / "results" / "smoke.json").read_text())


def table_of(name: str) -> harness.Table:
    return imported(HERE / "trime" / name / "run.py").TABLE


def without_seconds(results: dict) -> dict:
    """The figures by row and seed, but for speeds."""
    return {
        key: {seed: {c: f for c, f in made["figures"].items() if "/s" not in c} for seed, made in seeds.items()}
        for key, seeds in results["measurements"].items()
    }


def test_all_tables_of_the_paper_are_there() -> None:
    tables = [f"table{number}" for number in (2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15)]
    assert set(NAMES) == {*tables, "figure3"}


@pytest.mark.parametrize("name", NAMES)
def test_a_table_runs_in_its_smoke_setting(root: Path, name: str) -> None:
    if name == "table6":
        pytest.importorskip("sacrebleu")
    results, table = run(root, name), table_of(name)
    assert results["size"] == "smoke"
    assert Settings.from_dict(results["settings"]).seeds == [0]
    assert list(results["measurements"]) == [table.key(row) for row in table.rows]
    for row in table.rows:
        made = results["measurements"][table.key(row)]["0"]
        assert made.keys() == FIELDS
        assert list(made["figures"]) == list(row.paper)
        for column, figure in made["figures"].items():
            if "frequency_buckets" not in table.columns[column]:  # a small text has no words that are that frequent
                assert math.isfinite(figure)
        assert (made["tuned"] is None) == (row.testing is None)
        assert made["training"]["step"] == 2
        assert all(split["tokens_per_second"] > 0 for split in made["splits"].values())
        assert str(root) not in json.dumps(made)


def test_what_is_measured_is_what_tuning_found(root: Path) -> None:
    """Perplexity on valid is what tuning on it promised, which at test time alone is never worse than no memory."""
    made = {key: seeds["0"] for key, seeds in run(root, "table10")["measurements"].items()}
    for key, row in made.items():
        if row["tuned"] is not None:
            assert row["figures"]["dev"] == pytest.approx(row["tuned"]["perplexity"], rel=1e-3)
        if "continuous cache" in key or key == "kNN-LM":
            assert row["figures"]["dev"] < made["Transformer"]["figures"]["dev"]
    assert made["kNN-LM"]["tuned"]["store_rows"] == made["TRIME ext"]["tuned"]["store_rows"] > 1000
    assert made["+ continuous cache"]["tuned"]["settings"]["long"] == 0


def forbidden(*args, **kwargs):
    raise AssertionError("this was done before")


def test_a_second_run_does_nothing_and_tables_share_their_models(root: Path, monkeypatch) -> None:
    first = run(root, "table10")
    monkeypatch.setattr(models, "train", forbidden)
    assert (
        without_seconds(run(root, "table14"))["TRIME"]["0"]["all"]
        == first["measurements"]["TRIME"]["0"]["figures"]["dev"]
    )
    run(root, "table13")
    results = root / "trime" / "table10" / "results" / "smoke.json"
    results.unlink()
    with monkeypatch.context() as more:
        more.setattr(harness, "evaluate", forbidden)
        more.setattr(harness.Measurement, "loaded", forbidden)
        assert without_seconds(run(root, "table10")) == without_seconds(first)
    monkeypatch.setattr(harness.Measurement, "make", forbidden)
    written = results.read_bytes()
    run(root, "table10")
    assert results.read_bytes() == written


def test_a_run_that_was_stopped_goes_on(root: Path, monkeypatch) -> None:
    """Stopped in the middle of the second measurement: the first is in the results, and nothing is trained again."""
    whole, results = run(root, "table13"), root / "trime" / "table13" / "results" / "smoke.json"
    results.unlink()
    measure, train, measured, trained = harness.evaluate, models.train, [], []

    def stops(*args):
        measured.append(args)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return measure(*args)

    def counted(*args):
        trained.append(args)
        return train(*args)

    monkeypatch.setattr(models, "train", counted)
    with monkeypatch.context() as stopped:
        stopped.setattr(harness, "evaluate", stops)
        with pytest.raises(KeyboardInterrupt):
            run(root, "table13", "stopped")
    assert [bool(seeds) for seeds in json.loads(results.read_text())["measurements"].values()] == [True, False]
    assert len(trained) == 2
    assert without_seconds(run(root, "table13", "stopped")) == without_seconds(whole)
    assert len(trained) == 2


def test_other_seeds_are_added_and_other_settings_measured_anew(root: Path) -> None:
    def of(results: dict, seed: str) -> dict:
        return results["measurements"]["TRIME ext"][seed]

    before = run(root, "table13", "runs", "--seeds", "0")
    after = run(root, "table13", "runs", "--seeds", "1")
    assert of(after, "0") == of(before, "0")
    assert of(after, "1")["figures"] != of(after, "0")["figures"]
    settings = root / "trime" / "table13" / "smoke.toml"
    text = settings.read_text()
    try:
        settings.write_text(text + "k = 2\n")
        changed = run(root, "table13", "runs", "--seeds", "0")
    finally:
        settings.write_text(text)
    assert of(changed, "0")["identity"] != of(before, "0")["identity"]
    assert of(changed, "0")["model"] == of(before, "0")["model"]
    assert of(changed, "0")["tuned"]["settings"]["k"] <= 2
    assert list(changed["measurements"]["TRIME ext"]) == ["0"]  # seed 1 was of other settings


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_each_row_once_and_valid_settings_of_all_sizes(name: str) -> None:
    table = table_of(name)
    assert len({table.key(row) for row in table.rows}) == len(table.rows)
    assert all(row.paper.keys() <= table.columns.keys() for row in table.rows)
    for size in runner.SIZES:
        settings = Settings.read(HERE / "trime" / name / f"{size}.toml")
        assert {row.variant for row in table.rows} - {""} == settings.variants.keys()
        for row in table.rows:
            varied = settings.varied(row.variant)
            assert read_new_model(varied.model) is not None
            made = harness.Measurement(table, row, varied, 3, Path("runs"))
            assert (made.model.config.seed, made.model.folder.parent) == (3, Path("runs"))


@pytest.mark.parametrize(
    ("size", "one", "other"),
    [
        ("small", "figure3 bytes", "table4"),
        ("paper", "figure3 bytes", "table4"),
        ("small", "figure3", "table10"),
        ("small", "table14", "table13"),
        ("small", "table5", "table10"),
        ("paper", "table5", "table2"),
    ],
)
def test_tables_that_have_the_same_models(size: str, one: str, other: str) -> None:
    """As their settings say: a model is trained once for all of them."""

    def identity(name: str) -> str:
        table, *variant = name.split()
        settings = Settings.read(HERE / "trime" / table / f"{size}.toml")
        return models.Model(models.LONG, settings.varied("".join(variant)), 0, Path("runs")).identity

    assert identity(one) == identity(other)


def test_settings_like_others_differ_in_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('k = 3\n[home]\ncorpus = "stdlib"\n[train]\nsteps = 7\nwarmup = 2\n')
    (tmp_path / "b.toml").write_text('like = "a.toml"\n[train]\nsteps = 9\n[variants.x]\nlong = 5\n')
    settings = Settings.read(tmp_path / "b.toml")
    assert (settings.k, settings.train, settings.long) == (3, {"steps": 9, "warmup": 2}, 0)
    assert settings.varied("x").long == 5
    with pytest.raises(UsageError, match="unknown variant 'y'"):
        settings.varied("y")
    (tmp_path / "c.toml").write_text('like = "a.toml"\nlnog = 4\n')
    with pytest.raises(UsageError, match="did you mean 'long'"):
        Settings.read(tmp_path / "c.toml")
    (tmp_path / "d.toml").write_text('like = "a.toml"\n[train]\nstep = 9\n')
    with pytest.raises(UsageError, match="did you mean 'steps'"):
        Settings.read(tmp_path / "d.toml")


def test_a_text_is_cut_and_written_as_wikitext() -> None:
    raw = "It’s well-known,\nsaid “he”; 1,000.5 of\nthem.\n\nThe end."
    assert wikitext_style(raw) == (' It \'s well @-@ known , said " he " ; 1 @,@ 000 @.@ 5 of them . \n The end . \n')
    cut = Text(corpus="stdlib", documents={"train": 2}, characters={"train": 50, "valid": 60}).open()
    assert [len(document.text) for document in cut.documents("train")] == [50, 50]
    assert {len(document.text) for document in cut.documents("valid")} == {60}
    pairs = list(Text(corpus="numbers").open().pairs("valid"))
    assert len(pairs) == 6
    assert all(len(source.text.split()) == len(target.text.split()) for source, target in pairs)


def made_up(figures: dict[str, float], seconds: float = 10.0) -> dict:
    return {"figures": figures, "commit": "0123456789abcdef-dirty", "machine": {"processors": 2}, "seconds": seconds}


def test_the_readme_has_means_ranges_and_changes_beside_the_papers(tmp_path: Path) -> None:
    table = table_of("table11")
    results = {
        "measurements": {
            "TRIME ext": {"0": made_up({"dev": 40.0}), "1": made_up({"dev": 50.0})},
            "without BM25 batches": {"0": made_up({"dev": 44.0}), "1": made_up({"dev": 60.0})},
        }
    }
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{readme.BEGIN}\nold\n{readme.END}\nend\n")
    readme.put_table(path, table, results, "small")
    assert path.read_text().splitlines() == [
        "# Title",
        "",
        readme.BEGIN,
        "| model | dev, paper | dev, ours | change, paper | change, ours |",
        "| --- | --- | --- | --- | --- |",
        "| TRIME ext | 41.50 | 45.00 (40.00 to 50.00) | +0.0% | +0.0% |",
        "| without BM25 batches | 45.71 | 52.00 (44.00 to 60.00) | +10.1% | +15.0% |",
        "| without gradient into the memory | 45.15 | not run | +8.8% | – |",
        "",
        "Size: small. Seeds: 0, 1. Commit: 0123456789-dirty. Processors: 2. "
        "Seconds, of what was not shared with another table: 40.",
        readme.END,
        "end",
    ]
    path.write_text("no place")
    with pytest.raises(UsageError, match="has no place for the table"):
        readme.put_table(path, table, results, "small")


def test_a_matrix_is_one_row_for_each_label() -> None:
    lines = readme.lines(table_of("table7"), {"measurements": {"TRIME long: local": {"0": made_up({"local": 17.5})}}})
    assert len(lines) == 5
    assert lines[3] == "| TRIME long | 17.12 | 17.50 | 17.01 | not run | 16.48 | not run |"


def test_nothing_is_left_on_the_path_of_imports_twice() -> None:
    imported(HERE / "run.py")
    assert sys.path.count(str(HERE)) == 1
