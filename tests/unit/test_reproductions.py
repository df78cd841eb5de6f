"""The runner of the reproductions: it finds rows by their folders and names the nearest for one that is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mnemic.errors import UsageError

SCRIPT = Path(__file__).parents[2] / "reproductions" / "run.py"
ROW = """
def main(folder, size, seeds, runs):
    (folder / 'ran').write_text(f'{size} {seeds} {runs}')

def table(folder, size):
    (folder / 'table').write_text(size)
"""


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("reproductions_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for row in ("trime/table10", "trime/table2", "pkm/figure3"):
        (tmp_path / row).mkdir(parents=True)
        (tmp_path / row / "run.py").write_text(ROW)
    (tmp_path / "pkm" / "not-a-row").mkdir()
    return tmp_path


def test_it_lists_and_runs_what_exists(runner, root: Path, capsys) -> None:
    runner.run(root, [])
    assert capsys.readouterr().out == "pkm: figure3\ntrime: table10, table2\n"
    runner.run(root, ["trime", "table2"])
    assert [str(path.relative_to(root)) for path in root.rglob("ran")] == ["trime/table2/ran"]
    assert (root / "trime/table2/ran").read_text() == "small None runs/reproductions"
    assert (root / "trime/table2/table").read_text() == "small"


def test_size_seeds_and_folders_are_options(runner, root: Path, monkeypatch) -> None:
    monkeypatch.setenv("MNEMIC_DATA", "elsewhere")
    options = ["--seeds", "3,5", "--runs", "here", "--data", "texts"]
    runner.run(root, ["trime", "table2", "smoke", *options])
    assert (root / "trime/table2/ran").read_text() == "smoke [3, 5] here"
    assert os.environ["MNEMIC_DATA"] == "texts"
    assert not (root / "trime/table2/table").exists()  # a README has no figures of the tests


def test_the_table_alone_runs_nothing(runner, root: Path) -> None:
    runner.run(root, ["trime", "table2", "paper", "--table"])
    assert (root / "trime/table2/table").read_text() == "paper"
    assert not list(root.rglob("ran"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trme", "table10"], "unknown paper 'trme': did you mean 'trime'"),
        (["trime", "tabel10"], "unknown row of trime 'tabel10': did you mean 'table10'"),
        (["trime"], "the rows of trime are table10, table2"),
        (["pkm", "not-a-row"], "unknown row of pkm 'not-a-row'"),
        (["pkm", "figure3", "smal"], "unknown size 'smal': did you mean 'small'"),
        (["pkm", "figure3", "--seeds", "a"], "--seeds a: expected numbers"),
        (["pkm", "figure3", "--only", "it"], "figure3 is measured as a whole: leave out --only it"),
        (["pkm", "figure3", "--tabel"], "unknown option --tabel: did you mean --table"),
    ],
)
def test_a_missing_row_is_a_usage_error_with_the_nearest(runner, root: Path, arguments, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        runner.run(root, arguments)


def test_as_a_command_it_exits_with_2_and_one_line() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "no-such-paper", "row"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("reproduce: unknown paper 'no-such-paper'")
    assert done.stderr.count("\n") == 1
