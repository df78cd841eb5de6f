"""A small corpus and a run trained on it, for the verbs that use one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mnemic.cli import main

SMALL = ["--tokenizer", "byte", "--batch-size", "2", "--segment-length", "16", "--warmup", "1"]
DECODER = "decoder:hidden_size=16,num_hidden_layers=1,num_attention_heads=2"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of three documents for each split."""
    root = tmp_path_factory.mktemp("corpus")
    for split in ("train", "valid", "test"):
        (root / split).mkdir()
        for number in range(3):
            (root / split / f"{number}.txt").write_text(f"document {number} of {split}: " + "abc abd abe. " * 10)
    return root


def train(corpus: Path, out: Path, *more: str) -> int:
    """Trains a tiny decoder for four steps."""
    return main(["train", str(corpus), "--model", DECODER, "--out", str(out), "--steps", "4", *SMALL, *more])


@pytest.fixture(scope="session")
def run(corpus: Path, tmp_path_factory) -> Path:
    """The folder of a run with memory tokens."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train(corpus, out, "--memory", "tokens:count=2") == 0
    return out
