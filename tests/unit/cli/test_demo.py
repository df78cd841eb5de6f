"""The demo: what it concludes, and a very small one from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mnemic
from mnemic.analysis.report import Contender
from mnemic.cli import main
from mnemic.cli.demo import BASE, CHANCE, beginnings, conclusions
from mnemic.memories import registry


def contenders(base: float, chance: float, memory: float) -> list[Contender]:
    values = {BASE: base, CHANCE: chance, "tokens": memory}
    return [Contender(name, {"perplexity/token": value}, [], "") for name, value in values.items()]


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        (9.0, "tokens: 1.00 lower than without memory, more than chance alone did here."),
        (9.8, "tokens: 0.20 lower than without memory, no more than chance alone did here."),
        (12.0, "tokens: 2.00 higher than without memory, more than chance alone did here."),
    ],
)
def test_the_conclusion_is_measured_against_chance(memory: float, verdict: str) -> None:
    spread, conclusion = conclusions(contenders(10.0, 10.5, memory))
    assert "0.50 apart" in spread
    assert conclusion == verdict


def test_only_the_beginnings_are_read(corpus: Path) -> None:
    from mnemic.data import open_corpus

    whole, part = open_corpus(str(corpus)), beginnings(open_corpus(str(corpus)), 10)
    assert part.splits == whole.splits
    texts = [document.text for document in whole.documents("valid")]
    assert [document.text for document in part.documents("valid")] == [text[:10] for text in texts]


def sum_of_rows(demo: Path) -> int:
    """The rows of the texts that were taught."""
    with mnemic.open_store(demo / "taught.store") as store:
        return store.summary().namespaces["taught"]


def test_a_small_demo_from_end_to_end(tmp_path: Path, corpus: Path, capsys) -> None:
    sizes = ["--steps", "2", "--batch-size", "2", "--segment-length", "16", "--layers", "1", "--width", "16"]
    arguments = ["demo", "--out", str(tmp_path / "demo"), *sizes, "--vocab-size", "300", "--corpus", str(corpus)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    for name in (BASE, CHANCE, *registry()):
        assert f"\n{name} " in captured.out
    assert "perplexity/token" in captured.out
    assert f"report: {tmp_path / 'demo/report.html'}" in captured.out
    assert "3 of 3" in captured.err or len(list(registry())) > 1
    results = json.loads((tmp_path / "demo/results.json").read_text())
    assert set(results["rows"]) == {BASE, CHANCE, *registry()}
    assert results["rows"][BASE] != results["rows"][CHANCE]
    lesson = results["lesson"]
    assert (lesson["documents"], lesson["rows"]) == (3, sum_of_rows(tmp_path / "demo"))
    assert f"{lesson['taught']:.1f}. No weight was changed." in captured.out
    assert lesson["taught"] < lesson["plain"]
    assert (tmp_path / "demo/report.html").read_text().count("<svg") == 1
    assert main([*arguments, "--json"]) == 0, "an earlier demo is replaced"
    again = json.loads(capsys.readouterr().out)["rows"]
    quality = ["perplexity/token", "perplexity/byte", "parameters"]
    assert [[again[name][key] for key in quality] for name in again] == [
        [results["rows"][name][key] for key in quality] for name in again
    ], "the same demo gives the same figures"
