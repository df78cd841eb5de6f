"""Training models that translate: the loss against one pair and one token at a time, and going on with a run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

import mnemic
from mnemic.data import Document
from mnemic.data.pair_batches import PairBatches, TokenizedPairs, tokenize_pairs
from mnemic.data.pairs import ParallelCorpus
from mnemic.errors import UsageError
from mnemic.models import MnemicEncoderDecoderConfig, MnemicEncoderDecoderForConditionalGeneration
from mnemic.train.loop import Loop
from mnemic.train.objectives import make_objective, model_kind
from mnemic.train.seq2seq import Seq2Seq
from tests.unit.train.test_resume import Stop, stop_at

KINDS = ["ours", "marian", "bart", "t5"]


def build(kind: str, tokenizer: Any, **options: Any) -> Any:
    """A tiny model that translates."""
    torch.manual_seed(0)
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    ends = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": padding}
    if kind == "ours":
        shape = {"hidden_size": 16, "num_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
        settings = {**ends, **shape, "decoder_start_token_id": end, **options}
        return MnemicEncoderDecoderForConditionalGeneration(MnemicEncoderDecoderConfig(**settings))
    if kind == "t5":
        shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        return T5ForConditionalGeneration(T5Config(**{**ends, **shape, "decoder_start_token_id": padding, **options}))
    shape = {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in SIDES.items()}
    shape |= {"d_model": 16, "max_position_embeddings": 64, "dropout": 0.0, "forced_eos_token_id": end, "init_std": 0.3}
    if kind == "marian":
        return MarianMTModel(MarianConfig(**{**ends, **shape, "decoder_start_token_id": padding, **options}))
    return BartForConditionalGeneration(BartConfig(**{**ends, **shape, "decoder_start_token_id": end, **options}))


SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}


def parallel(pairs: list[tuple[str, str]], valid: list[tuple[str, str]] | None = None) -> ParallelCorpus:
    def side(split: list[tuple[str, str]], place: int) -> Callable[[], list[Document]]:
        return lambda: [Document(f"{place}:{number}", pair[place]) for number, pair in enumerate(split)]

    splits = {"train": pairs, "valid": valid or pairs}
    return ParallelCorpus("pairs", {n: {"a": side(s, 0), "b": side(s, 1)} for n, s in splits.items()}, ("a", "b"))


def some_pairs(count: int = 12) -> list[tuple[str, str]]:
    random = np.random.default_rng(4)
    words = ["".join(map(chr, random.integers(97, 103, length))) for length in random.integers(1, 8, 2 * count)]
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.fixture
def pairs(tokenizer) -> TokenizedPairs:
    corpus = parallel(some_pairs())
    return tokenize_pairs(lambda: corpus.pairs("train"), tokenizer)


def naive_loss(model: Any, pairs: TokenizedPairs, number: int) -> float:
    """The loss of one pair in double precision, each of its target's tokens by itself, without padding."""
    total = 0.0
    source, target = (torch.from_numpy(side)[None] for side in pairs[number])
    start = torch.tensor([[model.config.decoder_start_token_id]])
    for place in range(target.shape[1]):
        read = torch.cat([start, target[:, :place]], dim=1)
        logits = model(input_ids=source, decoder_input_ids=read).logits[0, -1].double()
        total -= logits.log_softmax(-1)[target[0, place]].item()
    return total


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_loss_is_the_sum_over_the_tokens_of_all_targets(kind, pairs, tokenizer):
    model = build(kind, tokenizer).double().eval()
    objective = make_objective("auto", model, tokenizer, 0)
    assert isinstance(objective, Seq2Seq)
    naive = [naive_loss(model, pairs, number) for number in range(len(pairs))]
    for rows, longest in ((1, 9), (5, 9), (12, 30)):
        total, count = 0.0, 0
        for batch in PairBatches(pairs, rows, longest, epochs=1):
            ready = objective.prepare(batch, 1)
            loss, targets = objective.loss(ready, None)
            total, count = total + loss.item(), count + targets
            numbers = batch["pair"].tolist()
            own = [naive[number] if number >= 0 else 0.0 for number in numbers]
            assert objective.losses(ready, None).sum(1).tolist() == pytest.approx(own, rel=1e-9)
        assert total == pytest.approx(sum(naive), rel=1e-9)
        assert count == pairs.target_count == sum(len(target) + 1 for _, target in some_pairs())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_pair_change_no_gradient(kind, pairs, tokenizer):
    model = build(kind, tokenizer).double()

    def gradients(rows: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        objective = Seq2Seq(model, tokenizer, 0)
        for batch in PairBatches(pairs, rows, 9, epochs=1, shuffle=False):
            objective.loss(objective.prepare(batch, 1), None)[0].backward()
        return {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    alone, together = gradients(1), gradients(8)
    assert sum(len(batch["pair"]) for batch in PairBatches(pairs, 8, 9, epochs=1)) > len(pairs)
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-9, atol=1e-12)


def test_the_decoder_reads_the_target_behind_the_start_token(pairs, tokenizer):
    model = build("marian", tokenizer, pad_token_id=3, decoder_start_token_id=7)
    objective = Seq2Seq(model, tokenizer, 0)
    for batch in PairBatches(pairs, 4, 9, epochs=1):
        ready = objective.prepare(batch, 1)
        for row, number in enumerate(batch["pair"].tolist()):
            if number >= 0:
                source, target = pairs[number]
                read = ready["decoder_input_ids"][row].tolist()
                assert read[: len(target)] == [7, *target[:-1].tolist()]
                assert set(read[len(target) + 1 :]) <= {3}
                assert set(ready["input_ids"][row, len(source) :].tolist()) <= {3}


@torch.no_grad()
def test_label_smoothing(pairs, tokenizer):
    model = build("ours", tokenizer).double()
    smooth, plain = (make_objective("seq2seq", model, tokenizer, 0, share) for share in (0.3, 0.0))
    batch = smooth.prepare(next(PairBatches(pairs, 12, 9)), 1)
    logits = model(**smooth.inputs(batch)).logits.log_softmax(-1)
    for row, place in product(*map(range, batch["targets"].shape)):
        target = batch["targets"][row, place]
        expected = -0.7 * logits[row, place, target] - 0.3 * logits[row, place].mean() if target >= 0 else 0.0
        assert smooth.losses(batch, None)[row, place].item() == pytest.approx(float(expected), rel=1e-5)
    model.eval()
    assert torch.equal(smooth.losses(batch, None), plain.losses(batch, None))


def test_what_does_not_suit_the_model_is_refused(pairs, tokenizer, make_model, corpus, settings):
    model = build("ours", tokenizer)
    assert model_kind(model) == "seq2seq"
    with pytest.raises(UsageError, match="'next-token' is for causal models"):
        make_objective("next-token", model, tokenizer, 0)
    with pytest.raises(UsageError, match="BartModel has no language-model head"):
        model_kind(BartModel(build("bart", tokenizer).config))
    with pytest.raises(UsageError, match="with which token its decoder starts"):
        make_objective("auto", build("t5", tokenizer, decoder_start_token_id=None), tokenizer, 0)
    with pytest.raises(UsageError, match="only sequence-to-sequence models"):
        make_objective("auto", make_model(), tokenizer, 0, label_smoothing=0.1)
    with pytest.raises(UsageError, match=r"label_smoothing = 1\.0: expected 0 or more, below 1"):
        settings(label_smoothing=1.0)
    with pytest.raises(UsageError, match="tiny is not a parallel corpus"):
        mnemic.train(model, tokenizer, corpus, settings())


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_learns(kind, tokenizer, settings):
    run = mnemic.train(build(kind, tokenizer), tokenizer, parallel(some_pairs()), settings(steps=40, segment_length=16))
    assert run.losses[-1][1] < 0.7 * run.losses[0][1]
    assert run.report["objective"] == "Seq2Seq"
    again = type(build(kind, tokenizer)).from_pretrained(run.out / "model")
    assert again.config.decoder_start_token_id is not None


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_nothing_and_an_epoch_has_each_target_once(accumulate, tokenizer, settings, tmp_path):
    corpus = parallel(some_pairs(30))
    steps = len(list(PairBatches(tokenize_pairs(lambda: corpus.pairs("train"), tokenizer), 4, 12, epochs=1)))

    def losses(pieces: int) -> list[float]:
        config = settings(accumulate=pieces, steps=steps, out=str(tmp_path / str(pieces)), evaluate_every=2)
        run = mnemic.train(build("ours", tokenizer), tokenizer, corpus, config)
        targets = sum(len(target) + 1 for _, target in some_pairs(30))
        assert {run.report["tokens"], *(entry["tokens"] for entry in run.report["evaluations"])} == {targets}
        return [loss for _, loss in run.losses] + [entry["loss"] for entry in run.report["evaluations"]]

    assert losses(accumulate) == pytest.approx(losses(1), rel=1e-4)


@pytest.mark.parametrize("stops", [[0], [2, 4], [5, 7, 11]])
def test_stopped_anywhere_and_resumed_is_never_stopped(stops, tmp_path, tokenizer, settings):
    corpus, options = (
        parallel(some_pairs(30)),
        {"steps": 12, "log_every": 2, "evaluate_every": 5, "label_smoothing": 0.1},
    )
    make = {"dropout": 0.1}
    expected = mnemic.train(
        build("ours", tokenizer, **make), tokenizer, corpus, settings(**options, out=str(tmp_path / "straight"))
    )
    stopped = settings(**options, out=str(tmp_path / "stopped"), resume=True)
    for last in stops:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, last)
            with pytest.raises(Stop):
                mnemic.train(build("ours", tokenizer, **make), tokenizer, corpus, stopped)
        torch.rand(7)  # another process has other generators
    got = mnemic.train(build("ours", tokenizer, **make), tokenizer, corpus, stopped)
    assert got.losses == expected.losses
    for name in ("log.jsonl", "model/model.safetensors", "best/model.safetensors"):
        assert (got.out / name).read_bytes() == (expected.out / name).read_bytes()


def test_the_pairs_are_tokenised_once(tokenizer, settings):
    config, corpus = settings(), parallel(some_pairs())
    mnemic.train(build("ours", tokenizer), tokenizer, corpus, config)
    assert sorted(item.name for item in (Path(config.out) / "tokens/train").iterdir()) == ["source", "target"]
    loop = Loop(build("ours", tokenizer), tokenizer, corpus, settings(resume=True))
    opened = loop.objective.open_tokens(Path(config.out) / "tokens/train")
    assert opened.fingerprint == loop.stream.pairs.fingerprint
