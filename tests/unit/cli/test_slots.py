"""`mnemic slots` shows what a text reads, and writes a smaller model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mnemic
from mnemic.cli.loading import load_model
from tests.unit.cli.conftest import train
from tests.unit.cli.test_faults import fails
from tests.unit.cli.test_verbs import output

KEYS = "product_keys:layers=[0],slots=256,heads=2,k=4,key_dim=8"


@pytest.fixture(scope="module")
def keyed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with product keys."""
    out = tmp_path_factory.mktemp("runs") / "keyed"
    assert train(corpus, out, "--memory", KEYS) == 0
    return out


def test_slots_of_a_text_are_shown(keyed: Path, corpus: Path, capsys) -> None:
    text = corpus / "train" / "0.txt"
    found = json.loads(output(capsys, "slots", keyed, text, "--most", 4, "--json"))
    model, tokenizer = load_model(str(keyed))
    expected = mnemic.find_slots(model, tokenizer, text.read_text(), most=4)
    assert [(row["layer"], row["slot"], row["reads"]) for row in found] == [
        (s.layer, s.slot, s.reads) for s in expected
    ]
    assert [row["weight"] for row in found] == pytest.approx([slot.weight for slot in expected], rel=1e-5)
    lines = output(capsys, "slots", keyed, text, "--most", 4).splitlines()
    assert lines[0].split() == ["layer", "slot", "reads", "weight", "read", "most", "at"]
    assert len(lines) == 5
    token, times = expected[0].tokens[0]
    assert f"{json.dumps(token)} {times}" in lines[1]
    assert (
        len({line.index(f"  {json.dumps(row['tokens'][0][0])}") for line, row in zip(lines[1:], found, strict=True)})
        == 1
    )  # aligned


def test_a_smaller_model_is_written(keyed: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    said = output(capsys, "slots", keyed, corpus, "--prune", tmp_path / "smaller", "--weight", 0.9, "--window", 64)
    model, _ = load_model(str(tmp_path / "smaller"))
    (kept,) = model.memory.product_keys.config.kept
    assert 0 < kept < 256
    assert f"{kept} of 256 slots" in said
    assert "loss on valid, nats per token: " in said
    report = json.loads(
        output(capsys, "slots", tmp_path / "smaller", corpus, "--prune", tmp_path / "same", "--window", 64, "--json")
    )
    assert (report["slots_before"], report["loss_before"]) == (kept, pytest.approx(float(said.split()[-1]), abs=1e-4))
    loss = mnemic.evaluate(*load_model(str(tmp_path / "same")), str(corpus), window=64)
    assert loss["nll"] / loss["tokens"] == pytest.approx(report["loss_after"], rel=1e-6)


def test_what_cannot_be_is_told(keyed: Path, run: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    fails(capsys, 2, "slots are those of product keys", arguments=["slots", run, corpus])
    fails(capsys, 2, "--most 0: expected 1 or more", arguments=["slots", keyed, corpus, "--most", 0])
    fails(
        capsys, 2, "--held-out says which slots are dropped", arguments=["slots", keyed, corpus, "--held-out", "test"]
    )
    fails(capsys, 2, "exists already: choose a new folder", arguments=["slots", keyed, corpus, "--prune", tmp_path])
    fails(capsys, 2, "PruneSlotsConfig.weight", arguments=["slots", keyed, corpus, "--prune", "x", "--weight", 2])
