"""The command line as a whole: help without torch, one-line errors, exit codes, and quiet ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import mnemic.cli
from mnemic import __version__
from mnemic.cli import VERBS, main
from mnemic.errors import DamagedError, MnemicError, UnsupportedModel, UsageError

HEAVY = {"torch", "transformers", "datasets", "accelerate", "tokenizers", "matplotlib", "faiss", "numpy", "pandas"}


def imported_by(*arguments: str) -> tuple[set[str], str]:
    """The top-level modules that a command imports in a process of its own, and what it prints."""
    code = (
        "import sys, mnemic.cli; c = mnemic.cli.main(sys.argv[1:]); print(*sys.modules, file=sys.stderr); sys.exit(c)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}, done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    modules, text = imported_by(*arguments)
    assert "mnemic" in modules
    assert not modules & HEAVY
    assert text


def test_printing_a_config_needs_no_heavy_import() -> None:
    modules, text = imported_by("train", "stdlib", "--steps", "7", "--print-config")
    assert not modules & HEAVY
    assert "\nsteps = 7\n" in text


def test_the_overview_names_each_verb_with_its_first_line(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        module = sys.modules[f"mnemic.cli.{verb}"]
        assert f"  {verb:10}{module.__doc__.splitlines()[0]}\n" in text


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_ends_with_an_example(verb: str, capsys) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"\nexample:\n  mnemic {verb}" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_speaks_json(verb: str, capsys) -> None:
    main([verb, "--help"])
    assert "--json" in capsys.readouterr().out


def test_version_and_no_verb(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mnemic {__version__}\n"
    assert main([]) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "unknown verb 'trian': did you mean 'train'?"),
        (["--hepl"], "unknown option '--hepl': did you mean '--help'?"),
        (["train", "stdlib", "--stpes", "3"], "unknown option --stpes: did you mean --steps?"),
        (["train", "stdlib", "--steps", "x"], "--steps 'x': expected a whole number"),
        (["train", "stdlib", "--steps", "0"], "TrainConfig.steps = 0: expected 1 or more"),
        (["train", "stdlib", "--schedule", "cosin"], "unknown schedule 'cosin': did you mean 'cosine'?"),
        (["train", "--config", "no/such.toml"], "no such config file: no/such.toml"),
        (["train"], "no corpus was given"),
        (["evaluate", "only-a-model"], "the following arguments are required: corpus"),
        (["evaluate", "m", "c", "--metrics", "perplexty"], "unknown metric 'perplexty': did you mean 'perplexity'?"),
        (["generate", "m", "p", "--beams", "0"], "--max-new-tokens and --beams: expected 1 or more"),
        (["list", "memorys"], "unknown section 'memorys': did you mean 'memories'?"),
        (["demo", "--steps", "-1"], "--steps: expected 1 or more"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], sentence: str, capsys) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mnemic: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MnemicError("a\n  b"), 1, "mnemic: a b\n"),
        (UnsupportedModel("x"), 1, "mnemic: x\n"),
        (UsageError("x"), 2, "mnemic: x\n"),
        (DamagedError("x"), 3, "mnemic: x\n"),
        (KeyboardInterrupt(), 130, "\nmnemic: stopped\n"),
        (KeyboardInterrupt("all saved"), 130, "\nmnemic: all saved\n"),
    ],
)
def test_exit_codes(error: BaseException, code: int, line: str, capsys, monkeypatch) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(mnemic.cli, "_run", fail)
    assert main([]) == code
    assert capsys.readouterr().err == line


def test_debugging_shows_the_traceback(monkeypatch) -> None:
    monkeypatch.setenv("MNEMIC_DEBUG", "1")
    with pytest.raises(UsageError):
        main(["trian"])


def test_a_bug_is_not_hidden(monkeypatch) -> None:
    monkeypatch.setattr(mnemic.cli, "_run", lambda argv: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main([])


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import sys, mnemic.cli; mnemic.cli._overview = lambda: 'x' * 10_000_000; sys.exit(mnemic.cli.main(['--help']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("length", [10, 100_000])
def test_a_full_disk_behind_stdout_is_one_sentence(unbuffered: str, length: int) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    code = (
        f"import sys, mnemic.cli; mnemic.cli._overview = lambda: 'x' * {length}; sys.exit(mnemic.cli.main(['--help']))"
    )
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.stderr == b"mnemic: the output could not be written: No space left on device\n"
    assert done.returncode == 1


def test_python_m_mnemic_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "mnemic", "trian"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
