"""Output memory in translation: training with the batch as memory, batches of similar targets, and kNN-MT."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.cli import main
from mnemic.data.pair_batches import PairBatches, TokenizedPairs, tokenize_pairs
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.translation import translations
from mnemic.hf.keys import Ear
from mnemic.hf.losses import IGNORED
from mnemic.train.objectives import make_objective
from mnemic.train.seq2seq import Seq2Seq
from tests.unit.train.test_resume import Stop, stop_at
from tests.unit.train.test_seq2seq import KINDS, build, parallel, some_pairs

Seen = Callable[[int, int], list[tuple[int, int]]]


def with_memory(kind: str, tokenizer: Any, **options: Any) -> Any:
    return mnemic.augment(build(kind, tokenizer).double(), mnemic.OutputMemory(**options))


def tokenized(pairs: list[tuple[str, str]], tokenizer: Any) -> TokenizedPairs:
    return tokenize_pairs(lambda: parallel(pairs).pairs("train"), tokenizer)


def one_batch(objective: Seq2Seq, tokenizer: Any) -> dict[str, Tensor]:
    """Five pairs of different lengths in eight rows: there is padding in rows, and there are rows of padding."""
    batch = next(PairBatches(tokenized(some_pairs(5), tokenizer), 8, 9, epochs=1))
    assert (batch["pair"] < 0).sum() == 3
    assert (batch["targets"][batch["pair"] >= 0] == IGNORED).any()
    return objective.prepare(batch, 1)


@torch.no_grad()
def naive_losses(model: Any, batch: dict[str, Tensor], seen: Seen) -> Tensor:
    """-log P of Eq. 5 of each target, each pair read alone and without padding, by loops in double precision."""
    targets, keys, logits = batch["targets"], {}, {}
    ear = Ear.at_key(model.memory._places, "ffn")
    for row, number in enumerate(batch["pair"].tolist()):
        if number >= 0:
            source = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
            read = batch["decoder_input_ids"][row][targets[row] != IGNORED][None]
            with ear.listening() as heard, model.memory.disabled():
                logits[row] = model(input_ids=source, decoder_input_ids=read).logits[0]
            keys[row] = heard[-1].reshape(read.shape[1], -1)
    ear.close()
    losses = torch.zeros(targets.shape, dtype=torch.float64)
    for row, place in product(*map(range, targets.shape)):
        target = int(targets[row, place])
        if target == IGNORED:
            continue
        own, query = logits[row][place], keys[row][place]
        pairs = [
            (float(query @ keys[r][j]) / math.sqrt(len(query)), int(targets[r, j]))
            for r, j in seen(row, place)
            if int(targets[r, j]) != IGNORED
        ]
        top = math.exp(own[target]) + sum(math.exp(score) for score, value in pairs if value == target)
        bottom = float(own.exp().sum()) + sum(math.exp(score) for score, _ in pairs)
        losses[row, place] = math.log(bottom) - math.log(top)
    return losses


# Training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("training", "dropped"), [("local", 0.9), ("batch", 0.0), ("batch", 1.0)], ids=["local", "batch", "others only"]
)
def test_the_memory_of_training_is_that_of_the_paper(kind: str, training: str, dropped: float, tokenizer: Any) -> None:
    model = with_memory(kind, tokenizer, training=training, local_dropout=dropped).train()
    objective = make_objective("auto", model, tokenizer, 0)
    batch = one_batch(objective, tokenizer)
    rows, length = batch["targets"].shape

    def seen(row: int, place: int) -> list[tuple[int, int]]:
        own = [(row, j) for j in range(place)] if training == "local" or not dropped else []
        others = [(r, j) for r in range(rows) if r != row for j in range(length)] if training == "batch" else []
        return own + others

    found = objective.losses(batch, None).detach()
    torch.testing.assert_close(found, naive_losses(model, batch, seen), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(found, naive_losses(model, batch, lambda row, place: [])), "the memory counts"
    assert (found[batch["targets"] == IGNORED] == 0).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "t5"])  # its norms are in single precision
def test_the_gradient_goes_through_the_other_pairs(kind: str, tokenizer: Any) -> None:
    model = with_memory(kind, tokenizer, training="batch", local_dropout=1.0).train()
    objective = Seq2Seq(model, tokenizer, 0)
    batch = one_batch(objective, tokenizer)
    loss = objective.loss(batch, None)[0]
    loss.backward()
    for name in ("encoder", "decoder"):
        weights = [p for n, p in model.named_parameters() if f"{name}." in n and n.endswith("weight") and p.ndim == 2]
        parameter = weights[-1]
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).double()
        slopes = []
        with torch.no_grad():
            for step in (1e-6, -1e-6):
                parameter += step * direction
                slopes.append(float(objective.loss(batch, None)[0]))
                parameter -= step * direction
        slope = (slopes[0] - slopes[1]) / 2e-6
        assert slope == pytest.approx(float((parameter.grad * direction).sum()), rel=1e-4, abs=1e-7)


def test_label_smoothing_leaves_the_memory_in_the_loss_of_the_target(tokenizer: Any) -> None:
    model = with_memory("ours", tokenizer, training="batch", local_dropout=0.0).train()
    smooth, plain = (make_objective("seq2seq", model, tokenizer, 0, share) for share in (0.3, 0.0))
    batch = one_batch(smooth, tokenizer)
    with torch.no_grad(), model.memory.disabled():
        own = model(**smooth.inputs(batch)).logits.log_softmax(-1)
    expected = 0.7 * plain.losses(batch, None) - 0.3 * own.mean(-1)
    expected = expected.masked_fill(batch["targets"] == IGNORED, 0)
    torch.testing.assert_close(smooth.losses(batch, None), expected, rtol=1e-6, atol=1e-9)
    tokens = mnemic.augment(build("ours", tokenizer), mnemic.MemoryTokens(count=2))
    assert make_objective("seq2seq", tokens, tokenizer, 0, 0.1).losses(batch, None).isfinite().all()


# Batches of similar targets


def topics(count: int) -> list[tuple[str, str]]:
    """Pairs of six topics, each with letters of its own in its targets."""
    random, letters = np.random.default_rng(1), ["abc", "def", "ghi", "jkl", "mno", "pqr"]
    return [
        (chr(65 + n % 26) * (1 + n % 5), "".join(random.choice(list(letters[n % 6]), random.integers(3, 9))))
        for n in random.permutation(count)
    ]


def test_training_on_similar_targets_stopped_and_resumed(tmp_path: Path, tokenizer: Any, settings: Any) -> None:
    corpus, options = parallel(topics(40)), {"steps": 14, "batching": "similar", "evaluate_every": 5}

    def model() -> Any:
        return mnemic.augment(build("ours", tokenizer, dropout=0.1), mnemic.OutputMemory(training="batch"))

    expected = mnemic.train(model(), tokenizer, corpus, settings(**options, out=str(tmp_path / "straight")))
    stopped = settings(**options, out=str(tmp_path / "stopped"), resume=True)
    for last in (4, 9):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, last)
            with pytest.raises(Stop):
                mnemic.train(model(), tokenizer, corpus, stopped)
        torch.rand(3)
    got = mnemic.train(model(), tokenizer, corpus, stopped)
    assert got.losses == expected.losses
    assert (got.out / "log.jsonl").read_bytes() == (expected.out / "log.jsonl").read_bytes()
    plain = settings(**{**options, "batching": "documents"}, out=str(tmp_path / "plain"))
    assert mnemic.train(model(), tokenizer, corpus, plain).losses != expected.losses
    with pytest.raises(UsageError, match=r"batching = 'similar' \(was 'documents'\)"):
        mnemic.train(model(), tokenizer, corpus, settings(**options, out=str(tmp_path / "plain"), resume=True))


@pytest.mark.parametrize("batching", ["consecutive", "shuffled"])
def test_batches_of_segments_are_not_for_pairs(batching: str, tokenizer: Any, settings: Any) -> None:
    with pytest.raises(UsageError, match=f"batching = '{batching}' is of the segments of a text: pairs are batched by"):
        mnemic.train(build("ours", tokenizer), tokenizer, parallel(some_pairs()), settings(batching=batching))


# kNN-MT


def knn(store: Any, **options: Any) -> mnemic.OutputMemory:
    return mnemic.OutputMemory.knn(store, **{"k": 4, "weight": 0.999, "temperature": 1e-3, **options})


@pytest.mark.parametrize("key", ["ffn", "output"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_translations_is_recited(kind: str, key: str, tokenizer: Any) -> None:
    """The contexts of a pair that the store has are at distance 0 of its rows, which say what comes next."""
    model, pairs = build(kind, tokenizer).eval(), some_pairs(15)
    corpus, texts = parallel(pairs), tokenized(pairs, tokenizer)
    references = [target for _, target in pairs]
    config = EvaluateConfig(beams=4, max_new_tokens=12)
    alone = translations(model, tokenizer, texts, config)
    assert not set(alone) & set(references), "the model does not know them"
    store = mnemic.build_store(model, tokenizer, corpus, "ram:", layer=key, keys="float32", metric="l2")
    mnemic.augment(model, knn(store, key=key))
    for beams, batch_size in ((4, 1), (4, 8), (1, 3)):
        config = EvaluateConfig(beams=beams, max_new_tokens=12, batch_size=batch_size)
        assert translations(model, tokenizer, texts, config) == references
    with model.memory.disabled():
        assert translations(model, tokenizer, texts, EvaluateConfig(beams=4, max_new_tokens=12)) == alone
    measured = mnemic.evaluate(model, tokenizer, corpus, metrics=["perplexity"])
    assert measured["perplexity"] < 1.01


@pytest.mark.parametrize("kind", KINDS)
def test_translations_with_a_store_do_not_depend_on_batches(kind: str, tokenizer: Any) -> None:
    """Sources that the store does not have, a weight in between, and the local memory as well."""
    model = build(kind, tokenizer).double().eval()
    store = mnemic.build_store(model, tokenizer, parallel(some_pairs(15)), "ram:", keys="float32", metric="ip")
    others = tokenized([(target, source) for source, target in some_pairs(9)], tokenizer)
    plain = translations(model, tokenizer, others, EvaluateConfig(max_new_tokens=10))
    mnemic.augment(model, mnemic.OutputMemory(external=store, k=6, weight=0.6, temperature=0.5))
    found = [
        translations(model, tokenizer, others, EvaluateConfig(beams=4, max_new_tokens=10, batch_size=size))
        for size in (1, 2, 9)
    ]
    assert found[0] == found[1] == found[2] != plain
    assert len(set(found[0])) > 1


@torch.no_grad()
def test_the_loss_with_a_store_is_that_of_the_formula(tokenizer: Any) -> None:
    """P_final = (1 - w) P + w P' with the nearest rows by brute force (arXiv 2010.00710, Eq. 2 and 3)."""
    model = build("marian", tokenizer).double().eval()
    store = mnemic.build_store(model, tokenizer, parallel(some_pairs(15)), "ram:", keys="float32", metric="l2")
    rows, pairs = store.get(np.arange(len(store))), tokenized([("fade", "abba"), ("cab", "deaf")], tokenizer)
    assert rows.keys is not None
    mnemic.augment(model, knn(store, k=5, weight=0.3, temperature=2.0)).eval()
    objective, ear = Seq2Seq(model, tokenizer, 0), Ear.at_key(model.memory._places, "ffn")
    batch = objective.prepare(next(PairBatches(pairs, 2, 9, epochs=1, shuffle=False)), 0)
    found = objective.losses(batch, None)
    with ear.listening() as heard, model.memory.disabled():
        plain = model(**objective.inputs(batch)).logits.softmax(-1)
    ear.close()
    keys = heard[-1].reshape(*batch["targets"].shape, -1).float().numpy()
    for row, place in product(*map(range, batch["targets"].shape)):
        target = int(batch["targets"][row, place])
        if target != IGNORED:
            distances = np.square(rows.keys - keys[row, place]).sum(1, dtype=np.float64)
            nearest = np.argsort(distances)[:5]
            weights = np.exp(-distances[nearest] / 2.0)
            memory = weights[rows.values[nearest] == target].sum() / weights.sum()
            expected = -math.log(0.7 * float(plain[row, place, target]) + 0.3 * memory)
            assert float(found[row, place]) == pytest.approx(expected, rel=1e-4)


def test_the_command_line_builds_a_store_and_translates_with_it(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu")
    folder, out, store = tmp_path / "pairs", tmp_path / "run", tmp_path / "mt.store"
    folder.mkdir()
    for split, count in (("train", 30), ("valid", 6)):  # the valid pairs are among those of the store
        for place, language in enumerate(("de", "en")):
            words = (" ".join(pair[place] for _ in range(4)) for pair in some_pairs(30)[:count])
            (folder / f"{split}.{language}").write_text("\n".join(words) + "\n")
    model = "encoder-decoder:hidden_size=32,num_attention_heads=2,encoder_layers=1,decoder_layers=1"
    small = ["--vocab-size", "280", "--batch-size", "4", "--segment-length", "48", "--steps", "3", "--warmup", "1"]
    memory = ["--memory", "output:training=batch", "--batching", "similar"]
    assert main(["train", str(folder), "--model", model, "--out", str(out), *small, *memory]) == 0
    assert (
        main(["store", "build", str(store), str(folder), "--model", str(out), "--keys", "float32", "--metric", "l2"])
        == 0
    )
    capsys.readouterr()
    knn = f"output:external={store},similarity=distance,joint=false,training=none,local=false,k=4"
    measured = ["--metrics", "bleu", "--max-new-tokens", "40", "--json"]
    scores = []
    for weight in (0.0, 0.999):
        settings = ["--memory", f"{knn},weight={weight},mix_temperature=0.001"]
        assert main(["evaluate", str(out), str(folder), *settings, *measured]) == 0
        scores.append(json.loads(capsys.readouterr().out)["bleu"])
    assert scores[0] < 5
    assert scores[1] > 99
    assert main(["store", "search", str(store), some_pairs(30)[0][0], "--k", "3"]) == 0
    assert "3 nearest of" in capsys.readouterr().out


def test_what_was_found_similar_is_kept_in_the_run(tokenizer: Any, settings: Any, monkeypatch: Any) -> None:
    config, corpus = settings(steps=3, batching="similar"), parallel(topics(40))
    mnemic.train(build("ours", tokenizer), tokenizer, corpus, config)
    assert [file.name for file in (Path(config.out) / "neighbours").iterdir()] == ["similar-targets-20.safetensors"]
    monkeypatch.setattr("mnemic.data.similar.find_similar", lambda *_: pytest.fail("searched for again"))
    longer = settings(steps=5, batching="similar", schedule="cosine", resume=True, out=config.out)
    with pytest.raises(UsageError, match="steps"):  # the search was over before
        mnemic.train(build("ours", tokenizer), tokenizer, corpus, longer)
