"""The commit that a report names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mnemic.train.report import commit


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a repository with one commit of code, a results file and a text, in a folder of it."""
    for name in ("work/code.py", "work/results/small.json", "work/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first\n")
    git("init", "--quiet", at=tmp_path)
    git("add", ".", at=tmp_path)
    git("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "first", at=tmp_path)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def git(*words: str, at: Path) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", *words], cwd=at, check=True, capture_output=True, text=True).stdout.strip()


def test_a_report_names_the_commit(repository: Path) -> None:
    assert commit() == git("rev-parse", "HEAD", at=repository)


def test_changed_code_is_said_whether_it_is_staged_or_not(repository: Path) -> None:
    head = git("rev-parse", "HEAD", at=repository)
    (repository / "work/code.py").write_text("second\n")
    assert commit() == f"{head}-dirty"
    git("add", ".", at=repository)
    assert commit() == f"{head}-dirty"


def test_results_that_a_run_has_written_do_not_make_its_commit_another(repository: Path) -> None:
    (repository / "work/results/small.json").write_text("second\n")
    (repository / "work/README.md").write_text("second\n")
    assert commit() == git("rev-parse", "HEAD", at=repository)


def test_outside_of_a_repository_no_commit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert commit() is None
    git("init", "--quiet", at=tmp_path)  # a repository without a commit
    assert commit() is None
