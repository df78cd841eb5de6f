"""BLEU and the loss of translations: the same for any batch size, and what sacrebleu and a loop in float64 say."""

from __future__ import annotations

import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mnemic
from mnemic.cli import main
from mnemic.cli.loading import load_model
from mnemic.data import Document, train_tokenizer
from mnemic.data.pair_batches import TokenizedPairs, tokenize_pairs
from mnemic.data.pairs import Pair
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.translation import translations
from tests.unit.train.test_seq2seq import KINDS, build, naive_loss, parallel, some_pairs

sacrebleu = pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu")


def tokenized(corpus: Any, tokenizer: Any) -> TokenizedPairs:
    return tokenize_pairs(lambda: corpus.pairs("valid"), tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_perplexity_is_that_of_the_targets_given_the_sources(kind, tokenizer):
    model, corpus = build(kind, tokenizer).double().eval(), parallel([*some_pairs(), ("é x", "größer als 1")])
    pairs = tokenized(corpus, tokenizer)
    naive = sum(naive_loss(model, pairs, number) for number in range(len(pairs)))
    targets = [target for _, target in some_pairs()] + ["größer als 1"]
    for batch_size in (1, 3, 50):
        got = mnemic.evaluate(model, tokenizer, corpus, batch_size=batch_size)
        assert got["nll"] == pytest.approx(naive, rel=1e-9)
        assert got["tokens"] == sum(len(target.encode()) + 1 for target in targets)
        assert got["bytes"] == sum(len(target.encode()) for target in targets)
        assert got["characters"] == sum(map(len, targets))
        assert got["words"] == len(targets) + 2
        assert got["documents"] == len(targets)
        assert got["perplexity"] == pytest.approx(math.exp(naive / got["tokens"]))


def test_limits_take_whole_pairs(tokenizer):
    model, corpus = build("ours", tokenizer), parallel([("a", "xyz"), ("b", "uv"), ("c", "w")])
    assert mnemic.evaluate(model, tokenizer, corpus, max_documents=2)["tokens"] == 7
    for most, expected in ((1, 4), (4, 4), (5, 7), (100, 9)):
        assert mnemic.evaluate(model, tokenizer, corpus, max_tokens=most)["tokens"] == expected


@pytest.mark.parametrize(("kind", "beams"), list(product(KINDS, [1, 4])))
@torch.no_grad()
def test_translations_are_those_of_one_source_at_a_time_in_order(kind, beams, tokenizer):
    model = build(kind, tokenizer, **({"initializer_factor": 9.0} if kind == "t5" else {})).double().eval()
    pairs = tokenized(parallel(some_pairs(9)), tokenizer)
    expected = []
    for number in range(len(pairs)):
        source = torch.from_numpy(pairs[number][0])[None]
        written = model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            num_beams=beams,
            do_sample=False,
            max_new_tokens=12,
        )
        expected.append(tokenizer.decode(written[0], skip_special_tokens=True).strip())
    for batch_size in (1, 2, 4, 20):
        config = EvaluateConfig(batch_size=batch_size, beams=beams, max_new_tokens=12)
        assert translations(model, tokenizer, pairs, config) == expected
    assert len(set(expected)) > 1, "a model that says the same to all would hide a wrong order"


def test_bleu_is_what_sacrebleu_says_of_the_translations(tokenizer, monkeypatch):
    said = {
        "eins zwei drei vier fünf": "one two three four six .",
        "ein Hund läuft": "a dog runs through the grass",
        "x": "",
        "der Mann geht nach Hause": "the man is going home",
    }
    references = ["one two three four five .", "a dog runs through grass", "y", "the man goes home"]
    model = build("ours", tokenizer)
    asked = []

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        sources = [
            tokenizer.decode(row[mask.bool()], skip_special_tokens=True)
            for row, mask in zip(input_ids, attention_mask, strict=True)
        ]
        asked.append((len(sources), options["num_beams"]))
        rows = [[256, *said[source].encode(), 256] for source in sources]
        return torch.tensor([row + [257] * (60 - len(row)) for row in rows])

    monkeypatch.setattr(model, "generate", generate)
    corpus = parallel(list(zip(said, references, strict=True)))
    expected = sacrebleu.corpus_bleu(list(said.values()), [references])
    for batch_size in (1, 2, 9):
        got = mnemic.evaluate(model, tokenizer, corpus, metrics=["bleu"], batch_size=batch_size)
        assert got["bleu"] == expected.score
        assert 20 < got["bleu"] < 90
        assert got["bleu_signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert {beams for _, beams in asked} == {4}
    assert max(count for count, _ in asked) == 4


def test_it_leaves_no_trace(tokenizer):
    model, corpus = build("ours", tokenizer, dropout=0.5).train(), parallel(some_pairs(5))
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    options = {"metrics": ["bleu", "perplexity"], "max_new_tokens": 5}
    first = mnemic.evaluate(model, tokenizer, corpus, **options)
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert mnemic.evaluate(model, tokenizer, corpus, **options) == first
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_what_cannot_be_measured_is_refused(tokenizer, make_model, corpus, monkeypatch):
    pairs = parallel([("a" * 70, "b")])
    with pytest.raises(UsageError, match="bleu is of translations, which GPT2LMHeadModel does not make"):
        mnemic.evaluate(make_model("gpt2"), tokenizer, corpus, metrics=["bleu"])
    with pytest.raises(UsageError, match="tiny is not a parallel corpus"):
        mnemic.evaluate(build("ours", tokenizer), tokenizer, corpus)
    for metric in ("bleu", "perplexity"):
        with pytest.raises(UsageError, match=r"1:0 and its source have up to 71 tokens, but MarianMTModel has 64"):
            mnemic.evaluate(build("marian", tokenizer), tokenizer, pairs, metrics=[metric])
    with pytest.raises(UsageError, match="beams = 0: expected 1 or more"):
        EvaluateConfig(beams=0)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(UsageError, match=r"needs the package sacrebleu: pip install 'mnemic\[tasks\]'"):
        mnemic.evaluate(build("ours", tokenizer), tokenizer, pairs, metrics=["bleu"])


def backwards(count: int) -> list[tuple[str, str]]:
    """A language whose sentences are read from the other end."""
    random, words = np.random.default_rng(0), ["red", "green", "blue", "one", "two", "three"]
    sentences = [[words[n] for n in random.integers(0, len(words), length)] for length in random.integers(4, 6, count)]
    return [(" ".join(sentence), " ".join(reversed(sentence))) for sentence in sentences]


def test_a_tiny_model_learns_to_read_backwards(tmp_path):
    pairs = backwards(400)
    corpus = parallel(pairs[:360], pairs[360:])
    tokenizer = train_tokenizer([Document("all", " ".join(source for source, _ in pairs))], "word")
    model = build("ours", tokenizer, hidden_size=32, norm="pre")
    measured = {"metrics": ["perplexity", "bleu"], "max_new_tokens": 8, "batch_size": 40}
    before = mnemic.evaluate(model, tokenizer, corpus, **measured)
    run = mnemic.train(
        model,
        tokenizer,
        corpus,
        steps=400,
        batch_size=32,
        segment_length=8,
        warmup=30,
        learning_rate=1e-2,
        out=str(tmp_path),
    )
    after = mnemic.evaluate(model, tokenizer, corpus, **measured)
    assert run.losses[-1][1] < 0.3 * run.losses[0][1]
    assert after["perplexity"] < 1.3 < before["perplexity"]
    assert before["bleu"] < 20
    assert after["bleu"] > 80


def test_the_command_line_trains_and_evaluates(tmp_path, capsys):
    folder, out = tmp_path / "pairs", tmp_path / "run"
    folder.mkdir()
    for split, count in (("train", 20), ("valid", 5)):
        for place, language in enumerate(("de", "en")):
            (folder / f"{split}.{language}").write_text("\n".join(pair[place] for pair in backwards(count)) + "\n")
    model = "encoder-decoder:hidden_size=16,num_attention_heads=2,encoder_layers=1,decoder_layers=1"
    small = ["--vocab-size", "280", "--batch-size", "4", "--segment-length", "32", "--steps", "3", "--warmup", "1"]
    assert main(["train", str(folder), "--model", model, "--out", str(out), "--label-smoothing", "0.1", *small]) == 0
    assert main(["train", "--resume", "--out", str(out)]) == 0
    capsys.readouterr()
    measured = ["--metrics", "bleu,perplexity", "--beams", "2", "--max-new-tokens", "6"]
    assert main(["evaluate", str(out), str(folder), *measured, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["documents"], result["beams"], result["corpus"]) == (5, 2, str(folder))
    assert 0 <= result["bleu"] <= 100
    assert result["perplexity"] > 1
    vocabulary = json.loads(Path(out / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == 280
    assert main(["evaluate", str(out), f"{folder}:en-de", "--metrics", "bleu", "--max-new-tokens", "2"]) == 0
    assert "bleu signature" in capsys.readouterr().out
    source = backwards(1)[0][0]
    assert main(["generate", str(out), source, "--beams", "2", "--max-new-tokens", "6", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["text"]
    model, tokenizer = load_model(str(out))
    pairs = tokenize_pairs(lambda: [Pair(Document("s", source), Document("t", source))], tokenizer)
    assert [written.strip()] == translations(model.eval(), tokenizer, pairs, EvaluateConfig(beams=2, max_new_tokens=6))
    assert main(["generate", str(out), source, "--beams", "2", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.strip() == written.strip(), "a translation does not begin with its source"
    assert main(["generate", str(out), " "]) == 2
    assert "nothing to translate" in capsys.readouterr().err
