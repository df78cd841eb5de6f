"""Bad input and faults: one sentence, the right exit code, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mnemic.cli import main
from tests.unit.cli.conftest import DECODER, train


def fails(capsys, code: int, *sentences: str, arguments: list[object]) -> None:
    """Asserts that a command fails with `code`, says one line with `sentences` in it, and prints no result."""
    capsys.readouterr()
    got = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("mnemic: ")]
    assert (got, captured.out, len(lines)) == (code, "", 1), captured
    assert "Traceback" not in captured.err
    for sentence in sentences:
        assert sentence in lines[0]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "is empty"), (b"  \n \n", "is empty"), (b"abc\x00\xff\xfe" * 100, "is not a text file")],
    ids=["empty", "blank", "binary"],
)
def test_a_corpus_without_text(tmp_path: Path, capsys, content: bytes, sentence: str) -> None:
    (tmp_path / "corpus.txt").write_bytes(content)
    arguments = ["train", tmp_path / "corpus.txt", "--model", DECODER, "--tokenizer", "byte", "--out", tmp_path / "run"]
    fails(capsys, 2, str(tmp_path / "corpus.txt"), sentence, arguments=arguments)
    assert not (tmp_path / "run/model").exists()


def test_an_empty_folder(tmp_path: Path, capsys) -> None:
    (tmp_path / "corpus").mkdir()
    fails(capsys, 2, "corpus", arguments=["train", tmp_path / "corpus", "--out", tmp_path / "run"])


def test_documents_shorter_than_a_segment_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(5):
        (tmp_path / f"train/{number}.txt").write_text("abc"[: 1 + number % 3])
    assert train(tmp_path, tmp_path / "run", "--segment-length", "64") == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "stdlb"], "did you mean 'stdlib'?"),
        (["train", "stdlib", "--memory", "tokns"], "did you mean 'tokens'?"),
        (["train", "stdlib", "--model", "decoder:hiden_size=3"], "did you mean 'hidden_size'?"),
        (["train", "stdlib", "--model", "./no/such/folder"], "no model folder ./no/such/folder"),
        (["train", "stdlib", "--split", "trian"], "did you mean 'train'?"),
        (["train", "stdlib", "--model", "decoder:hidden_size=30,num_attention_heads=4"], "does not divide"),
        (["evaluate", "./no/such/folder", "stdlib"], "no model folder ./no/such/folder"),
        (["generate", "./no/such/folder", "x"], "no model folder ./no/such/folder"),
    ],
)
def test_unknown_names(tmp_path: Path, capsys, monkeypatch, arguments: list[str], sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    fails(
        capsys, 2, sentence, arguments=[*arguments, *(["--tokenizer", "byte"] if "decoder" in str(arguments) else [])]
    )
    assert not (tmp_path / "runs/train/model").exists()


def test_a_run_is_not_overwritten(run: Path, corpus: Path, capsys) -> None:
    before = snapshot(run)
    arguments = ["train", corpus, "--model", DECODER, "--tokenizer", "byte", "--out", run]
    fails(capsys, 2, f"{run} already holds a run", arguments=arguments)
    assert snapshot(run) == before


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (["--learning-rate", "0.5"], "learning_rate"),
        (["--memory", "tokens:count=7"], "memory"),
        (["--model", DECODER.replace("16", "32")], "hidden_size = 32 (was 16)"),
        (["--batch-size", "4"], "batch_size"),
    ],
    ids=["option", "memory", "model", "batch"],
)
def test_a_checkpoint_of_another_config(run: Path, tmp_path: Path, capsys, changed: list[str], sentence: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")  # as if it had been stopped before its end
    (tmp_path / "run/report.json").unlink()
    before = snapshot(tmp_path / "run")
    fails(capsys, 2, sentence, arguments=["train", "--resume", "--out", tmp_path / "run", *changed])
    assert snapshot(tmp_path / "run") == before


def test_a_damaged_model_is_exit_code_3(run: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    fails(capsys, 3, str(weights), "altered", arguments=["generate", tmp_path / "model", "abc"])
    fails(capsys, 3, str(weights), "altered", arguments=["evaluate", tmp_path / "model", corpus])


def test_a_folder_without_a_model(tmp_path: Path, capsys) -> None:
    fails(capsys, 2, str(tmp_path), arguments=["generate", tmp_path, "abc"])


def test_no_permission_to_write(corpus: Path, read_only_disk: Path, capsys) -> None:
    arguments = ["train", corpus, "--model", DECODER, "--tokenizer", "byte", "--out", read_only_disk / "run"]
    fails(capsys, 1, "no permission to write", str(read_only_disk), arguments=arguments)


def test_a_run_below_a_file(corpus: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("kept")
    arguments = ["train", corpus, "--model", DECODER, "--tokenizer", "byte", "--out", tmp_path / "file/run"]
    fails(capsys, 2, "is a file, not a folder", arguments=arguments)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_full_disk_keeps_what_is_there_and_resume_goes_on(corpus: Path, run: Path, small_disk: Path, capsys) -> None:
    out, ballast = small_disk / "run", small_disk / "ballast"
    arguments = ["--memory", "tokens:count=2", "--checkpoint-every", "1", "--keep", "9"]
    free = os.statvfs(small_disk)
    room = 260_000  # enough for the tokenizer, the tokens and a checkpoint or two, not for all of them
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - room))
    capsys.readouterr()
    assert train(corpus, out, *arguments) == 1
    error = capsys.readouterr().err
    assert "mnemic: the disk is full while writing" in error
    assert "Traceback" not in error
    ballast.unlink()
    assert train(corpus, out, *arguments, "--resume") == 0
    ours, expected = (json.loads((folder / "report.json").read_text()) for folder in (out, run))
    assert ours["losses"][-1]["loss"] == expected["losses"][-1]["loss"]
    assert (out / "model/model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()


def test_the_demo_replaces_no_folder_that_is_not_a_demo(tmp_path: Path, capsys) -> None:
    (tmp_path / "thesis.txt").write_text("kept")
    fails(capsys, 2, "holds something that is not a demo", arguments=["demo", "--out", tmp_path])
    assert (tmp_path / "thesis.txt").read_text() == "kept"
