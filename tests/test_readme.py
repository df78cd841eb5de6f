"""The README and the pages of docs/ are run: their Python, their `mnemic` command lines, links and `make` targets.

A block after the comment `<!-- needs the hub -->` is only compiled. The blocks share one folder, as a reader's would.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from mnemic.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
BLOCKS = re.findall(r"(<!-- needs the hub -->\n)?```(python|bash)\n(.*?)```", TEXT, flags=re.DOTALL)
PYTHON = [(bool(hub), code) for hub, language, code in BLOCKS if language == "python"]
COMMANDS = [
    line.partition(" #")[0].strip()
    for hub, language, code in BLOCKS
    if language == "bash" and not hub
    for line in code.splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("readme")


def test_there_is_something_to_run() -> None:
    assert [hub for hub, _ in PYTHON].count(False) >= 1
    assert sum(command.startswith("mnemic ") for command in COMMANDS) >= 5


@pytest.mark.parametrize("code", [code for _, code in PYTHON], ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_compiles_and_uses_names_that_exist(code: str) -> None:
    import mnemic

    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mnemic":
            assert hasattr(mnemic, node.attr), f"mnemic has no {node.attr}"


@pytest.mark.parametrize("code", [code for hub, code in PYTHON if not hub], ids=lambda code: code.splitlines()[-1][:40])
def test_python_runs(code: str, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    exec(compile(code, "README.md", "exec"), {})


def test_commands_run_in_order(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        if program == "mnemic":
            assert main(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
            assert capsys.readouterr().out, f"{command} printed nothing"
        else:
            assert program == "make", f"{command}: expected mnemic or make"


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "install"} <= named <= targets


def test_every_link_leads_to_a_file() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_folder_named_exists() -> None:
    for path in re.findall(r"`((?:src|tests|benchmarks|reproductions)/[\w/]*)`", README):
        assert (ROOT / path).is_dir(), path


def test_the_corpora_named_are_those_there_are() -> None:
    from mnemic.data import CORPORA

    sentence = re.search(r"or a name: (.*?)\.\n", README, flags=re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", sentence[1])) == set(CORPORA)


def test_the_page_of_models_names_what_the_source_does() -> None:
    from mnemic.hf.anatomy import ARCHITECTURES, Anatomy

    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    known, described = page.split("## Describing")
    rows = re.findall(r"^\| (causal|masked|sequence to sequence) \| (.*) \|$", known, flags=re.MULTILINE)
    named = {kind: set(re.findall(r"`([^`]+)`", names)) for kind, names in rows}
    there = {"causal": "causal", "masked": "masked", "sequence to sequence": "seq2seq"}
    assert named == {
        words: {name for name, anatomy in ARCHITECTURES.items() if anatomy.kind == kind}
        for words, kind in there.items()
    }
    for field, help in Anatomy.help().items():
        assert f"| `{field}` | `{getattr(Anatomy(), field)!r}` | {help} |" in described


def test_the_page_of_the_command_line_names_every_verb_and_section() -> None:
    from mnemic.cli import VERBS
    from mnemic.cli.list import SECTIONS

    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE) == list(VERBS)
    assert all(f"`{section}`" in page for section in SECTIONS)
