"""Staleness, classes apart and pictures of how slots are used, against examples worked by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import mnemic
from mnemic.analysis.usage import EVERYWHERE, apart, plot_apart, plot_staleness, plot_usage, staleness, staleness_of_run
from mnemic.data import Corpus, Document
from mnemic.errors import UsageError
from mnemic.memories.product_keys.usage import Counts, Usage
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM

TEXT = Corpus(
    "text", {split: lambda: iter([Document("a", "one two three four " * 40)]) for split in ("train", "valid")}
)


def tops(*counts: int) -> Counts:
    found = Counts.zeros(2, len(counts))
    found.tops[1] = torch.tensor(counts)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with product keys that kept three checkpoints of trained models."""
    out = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    tokenizer = mnemic.train_tokenizer([], kind="byte")
    shape = MnemicDecoderConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=3, num_attention_heads=2)
    model = mnemic.augment(
        MnemicDecoderForCausalLM(shape), mnemic.ProductKeys(layers=[0, 2], slots=64, heads=2, k=4, key_dim=8)
    )
    how = {"steps": 6, "batch_size": 2, "segment_length": 16, "learning_rate": 0.05, "warmup": 1}
    mnemic.train(model, tokenizer, TEXT, out=str(out), checkpoint_every=2, keep=9, **how)
    return out


def test_a_slot_is_stale_since_the_last_checkpoint_that_used_it() -> None:
    used = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 1, 0, 0, 1]]
    assert staleness([torch.tensor(row).bool() for row in used]) == [1, 1, 1, 2]


def test_classes_that_share_half_of_their_slots() -> None:
    one, other = tops(2, 2, 0, 0), tops(0, 1, 1, 0)
    found = apart(one, other)
    assert found["iou"] == pytest.approx(0.5 / 1.5)
    p, q = (
        [(1 - EVERYWHERE) * share + EVERYWHERE / 4 for share in some] for some in ((0.5, 0.5, 0, 0), (0, 0.5, 0.5, 0))
    )
    assert found["kl"] == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert apart(one, one) == {"kl": pytest.approx(0), "iou": pytest.approx(1)}
    with pytest.raises(UsageError, match="nothing was read"):
        apart(one, tops(0, 0, 0, 0))


def test_usage_counts_each_token_of_a_text_in_each_layer_and_head(run: Path) -> None:
    from mnemic.cli.loading import load_model

    model, tokenizer = load_model(str(run))
    found = mnemic.usage(model, tokenizer, TEXT, window=32)
    for counts in found.layers.values():
        assert (
            counts.tops.sum(1).tolist() == [24 * 32] * 2
        )  # 760 bytes in windows of 32, the last of which begins early
        assert counts.reads.sum().item() == 4 * counts.tops.sum().item()
        assert counts.weights.sum().item() == pytest.approx(counts.tops.sum().item(), rel=1e-5)


def test_staleness_of_a_run_goes_through_its_checkpoints(run: Path, tmp_path: Path) -> None:
    from mnemic.cli.loading import load_model

    model, tokenizer = load_model(str(run))
    found = staleness_of_run(model, tokenizer, TEXT, run)
    assert found["steps"] == [2, 4, 6]
    last = mnemic.usage(model, tokenizer, TEXT)
    for layer, slots in found["layers"].items():
        assert sum(slots) == 64
        assert slots[-1] == (last.layers[layer].tops.sum(0) > 0).sum().item()
    with pytest.raises(UsageError, match="0 checkpoints"):
        staleness_of_run(model, tokenizer, TEXT, tmp_path)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    found = Usage([1, 3], 2, 16)
    slots = torch.randint(16, (20, 2, 4), generator=torch.Generator().manual_seed(0))
    found.add(1, slots, torch.full((20, 2, 4), 0.25))
    plot_usage(found, tmp_path / "usage.png")
    plot_staleness({"a": {"steps": [2, 4], "layers": {1: [1, 2, 3]}}}, tmp_path / "staleness.png")
    plot_apart({"a": {1: {"kl": 0.5, "iou": 0.2}}}, tmp_path / "apart.png")
    for name in ("usage", "staleness", "apart"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_usage_on_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mnemic.cli import main

    book = tmp_path / "book.txt"
    book.write_text("one two three four " * 40)
    assert main(["usage", str(run), str(book), "--split", "all", "--stale", "--plots", str(tmp_path / "plots")]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("layer 0", "head 1", "step 6"))
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"usage.png", "staleness.png"}
    assert main(["usage", str(run / "model"), str(book), "--split", "all", "--stale"]) == 2
    assert "not the folder of a run" in capsys.readouterr().err
