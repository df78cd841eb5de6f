"""`mnemic attention` tells what each layer does with the memory tokens, in words, as JSON and in pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mnemic
from mnemic.cli import main
from mnemic.cli.loading import load_model
from mnemic.models import MnemicEncoderDecoderConfig, MnemicEncoderDecoderForConditionalGeneration
from tests.unit.cli.conftest import train
from tests.unit.cli.test_faults import fails
from tests.unit.cli.test_verbs import output


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an encoder-decoder with memory tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "translator", mnemic.train_tokenizer([], "byte")
    end = dict.fromkeys(("decoder_start_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    shape = {"hidden_size": 16, "num_attention_heads": 2, "encoder_layers": 2, "decoder_layers": 1}
    config = MnemicEncoderDecoderConfig(vocab_size=len(tokenizer), **shape, **end)
    model = mnemic.augment(MnemicEncoderDecoderForConditionalGeneration(config), mnemic.MemoryTokens(count=3))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_each_layer_is_told_in_words(run: Path, translator: Path, capsys) -> None:
    said = output(capsys, "attention", run, "abc abd")
    assert said.startswith("self: 8 tokens that attend to 8 and to 2 memory tokens\n  layer    write  process     read")
    assert "      0       0%     100%" in said
    assert "cannot see it" in said
    said = output(capsys, "attention", translator, "abc", "--target", "xy")
    assert "encoder: 4 tokens that attend to 4 and to 3 memory tokens" in said
    assert "cross: 3 tokens that attend to 4 and to 3 memory tokens\n" in said
    assert "      0        -        -" in said
    assert "decoder:" not in said  # which sees no memory


def test_the_figures_are_those_of_the_library(translator: Path, capsys) -> None:
    found = json.loads(output(capsys, "attention", translator, "abc", "--target", "xy", "--json"))
    maps = mnemic.attention_maps(*load_model(str(translator)), "abc", "xy")
    assert list(found["stacks"]) == ["encoder", "cross"]
    for name, stack in found["stacks"].items():
        assert stack["keys"] == list(maps[name].keys)
        assert stack["layers"] == maps.summary()[name]
        assert stack["heads"]["read"] == maps[name].measures["read"].tolist()
        assert stack["operations"] == maps[name].operations()
    assert found["notes"] == []


def test_pictures_are_drawn_and_texts_may_be_files(translator: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "source.txt").write_text("abc")
    (tmp_path / "target.txt").write_text("xy")
    files = [tmp_path / "source.txt", "--target", tmp_path / "target.txt"]
    assert main([str(a) for a in ["attention", translator, *files, "--json", "--out", tmp_path / "maps"]]) == 0
    printed, said = capsys.readouterr()
    assert json.loads(printed) == json.loads(output(capsys, "attention", translator, "abc", "--target", "xy", "--json"))
    drawn = {"encoder.png", "decoder.png", "cross.png", "summary.png"}
    assert {path.name for path in (tmp_path / "maps").iterdir()} == drawn
    assert all(name in said for name in drawn)
    output(capsys, "attention", translator, "a text too long for the name of a file " * 10, "--target", "x")


def test_what_cannot_be_is_told(run: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    fails(capsys, 2, "target is for sequence-to-sequence", arguments=["attention", run, "abc", "--target", "x"])
    fails(capsys, 2, "the text is empty", arguments=["attention", run, ""])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    fails(capsys, 2, "give a file of UTF-8 text", arguments=["attention", run, tmp_path / "binary"])
    for verb, option in (("attention", "--out"), ("usage", "--plots"), ("trace", "--plots")):
        there = [verb, run, corpus / "train/0.txt", option, tmp_path / "binary"]
        fails(capsys, 2, "a part of that path is a file", arguments=there)  # before anything is read
    assert train(corpus, tmp_path / "plain") == 0
    fails(capsys, 2, "has none: give it some", arguments=["attention", tmp_path / "plain", "abc"])
