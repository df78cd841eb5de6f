"""Bad input and faults: one sentence, the right exit code, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import mnemic
from mnemic.cli import main
from mnemic.cli.train import Experiment
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
        (["--model", DECODER.replace("16", "32")], "model = 'decoder:hidden_size=32"),
        (["--tokenizer", "word"], "tokenizer = 'word' (was 'byte')"),
        (["--vocab-size", "300"], "vocab_size = 300 (was None)"),
        (["stdlib"], "corpus = 'stdlib' (was "),
        (["--batch-size", "4"], "batch_size"),
    ],
    ids=["option", "memory", "model", "tokenizer", "vocabulary", "corpus", "batch"],
)
def test_a_checkpoint_of_another_config(run: Path, tmp_path: Path, capsys, changed: list[str], sentence: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")  # as if it had been stopped before its end
    (tmp_path / "run/report.json").unlink()
    before = snapshot(tmp_path / "run")
    fails(capsys, 2, sentence, arguments=["train", "--resume", "--out", tmp_path / "run", *changed])
    assert snapshot(tmp_path / "run") == before


def test_a_finished_run_keeps_its_settings_too(run: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    settings = tmp_path / "other.toml"
    settings.write_text((run / "experiment.toml").read_text().replace('tokenizer = "byte"', 'tokenizer = "word"'))
    for changed in (["--tokenizer", "word"], ["--config", settings]):
        arguments = ["train", "--resume", "--out", tmp_path / "run", *changed]
        fails(capsys, 2, "tokenizer = 'word' (was 'byte')", arguments=arguments)
    assert snapshot(tmp_path / "run") == before


def test_what_may_change_on_resume_stays_free(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert main(["train", "--resume", "--out", str(tmp_path / "run"), "--keep", "7", "--tokenizer", "byte"]) == 0
    assert Experiment.load(tmp_path / "run/experiment.toml").keep == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "decoder:position=foo"], "--model decoder:position 'foo': expected one of 't5'"),
        (["--model", "decoder:hidden_size=30,num_attention_heads=4"], "does not divide"),
        (["--model", "decoder:adaptive_cutoffs=[9,5]"], "expected rising numbers"),
        (["--memory", "tokens:count=-1"], "count = -1"),
    ],
    ids=["value", "together", "cutoffs", "memory"],
)
def test_settings_are_checked_before_a_tokenizer_is_trained(
    corpus: Path, tmp_path: Path, capsys, arguments: list[str], sentence: str
) -> None:
    fails(capsys, 2, sentence, arguments=["train", corpus, "--out", tmp_path / "run", *arguments])
    assert not (tmp_path / "run").exists()


def plain_model(folder: Path, kind: type, config: object) -> Path:
    """A folder with a model of transformers' own and the byte tokenizer."""
    kind(config).save_pretrained(folder)
    mnemic.train_tokenizer([], "byte").save_pretrained(folder)
    return folder


def gpt2(folder: Path, vocab_size: int = 259) -> Path:
    shape = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return plain_model(folder, GPT2LMHeadModel, GPT2Config(vocab_size=vocab_size, **shape))


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"\xff" * 8 + data[8:], lambda data: b""])
def test_a_damaged_model_of_transformers_is_exit_code_3(tmp_path: Path, corpus: Path, capsys, damage) -> None:
    weights = gpt2(tmp_path / "gpt2") / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    for arguments in (["generate", tmp_path / "gpt2", "abc"], ["evaluate", tmp_path / "gpt2", corpus]):
        fails(capsys, 3, str(tmp_path / "gpt2"), "damaged", arguments=arguments)


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path: Path, corpus: Path, capsys) -> None:
    folder = gpt2(tmp_path / "gpt2", vocab_size=100)
    sentence = "the tokenizer has 259 tokens and GPT2LMHeadModel only 100"
    fails(capsys, 2, sentence, arguments=["generate", folder, "abc"])
    fails(capsys, 2, sentence, arguments=["evaluate", folder, corpus, "--window", 32])
    arguments = ["train", corpus, "--model", folder, "--out", tmp_path / "run", "--segment-length", 32]
    fails(capsys, 2, sentence, arguments=arguments)


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_name_that_no_model_has(verb: str, corpus: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fails(capsys, 2, "no model 'nosuch' could be loaded from the hub", arguments=[verb, "nosuch", corpus])


def test_a_prompt_that_is_not_text(run: Path, capsys, monkeypatch) -> None:
    fails(capsys, 2, r"the argument '\udcff\udcfe' is not UTF-8", arguments=["generate", run, "\udcff\udcfe"])
    for errors in ("strict", "surrogateescape"):  # as in a UTF-8 locale, and in the C locale
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"abc\xff\xfe"), "utf-8", errors))
        fails(capsys, 2, "stdin is not UTF-8 text", arguments=["generate", run, "-"])


def test_a_document_with_a_lone_surrogate(tmp_path: Path, capsys) -> None:
    lines = [json.dumps({"text": text}) for text in ("good", "bad \ud800")]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    for kind in ("byte", "word", "bpe"):
        arguments = ["train", tmp_path / "corpus.jsonl", "--tokenizer", kind, "--out", tmp_path / kind]
        fails(capsys, 2, f"{tmp_path / 'corpus.jsonl'}, line 2", "surrogate", arguments=arguments)


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
