"""Training with recurrent memory tokens: back-propagation through the segments of a step, and no further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mnemic
from mnemic.data import Document
from mnemic.data.documents import Corpus
from mnemic.errors import UsageError
from mnemic.train.loop import Loop
from tests.contract.architectures import build
from tests.unit.train.test_resume import Stop, stop_at

WORDS = "a memory keeps what was read and gives it back when it is asked for".split()  # noqa: SIM905


@pytest.fixture
def long_corpus() -> Corpus:
    """Documents of several segments, of different lengths."""
    texts = [" ".join(WORDS[(n * i + i // 7) % len(WORDS)] for i in range(12 + 7 * n)) for n in range(9)]
    documents = [Document(str(n), text) for n, text in enumerate(texts)]
    return Corpus("long", {"train": lambda: documents[:7], "valid": lambda: documents[7:]})


@pytest.fixture
def make(make_model: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    def made(kind: str = "decoder", xl_length: int = 0, hidden_size: int = 16) -> Any:
        if kind == "opt":
            torch.manual_seed(0)
            base = build("opt").bfloat16()
            base.resize_token_embeddings(len(tokenizer))
            return mnemic.augment(base, mnemic.MemoryTokens.recurrent(count=3))
        options = {"xl_length": xl_length, "hidden_size": hidden_size, "dropout": 0.0} if kind == "decoder" else {}
        return mnemic.augment(make_model(kind, **options), mnemic.MemoryTokens.recurrent(count=3))

    return made


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("kind", "xl_length"), [("decoder", 0), ("decoder", 8), ("gpt2", 0), ("opt", 0)])
def test_stopped_and_resumed_is_never_stopped(
    long_corpus, tokenizer, make, settings, tmp_path, kind, xl_length, accumulate
) -> None:
    options = {"steps": 12, "segments": 2, "checkpoint_every": 2, "evaluate_every": 5, "accumulate": accumulate}
    straight = settings(**options, out=str(tmp_path / "straight"))
    expected = mnemic.train(make(kind, xl_length), tokenizer, long_corpus, straight)
    stopped = settings(**options, out=str(tmp_path / "stopped"), resume=True)
    for last in (3, 7, 8):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, last)
            with pytest.raises(Stop):
                mnemic.train(make(kind, xl_length), tokenizer, long_corpus, stopped)
    got = mnemic.train(make(kind, xl_length), tokenizer, long_corpus, stopped)
    assert got.losses == expected.losses


def loops(make, tokenizer, corpus, settings, tmp_path, **options: Any) -> Loop:
    return Loop(make(), tokenizer, corpus, settings(out=str(tmp_path / "loop"), batch_size=1, **options))


@pytest.mark.parametrize(("segments", "reaches"), [(1, 0), (2, 1), (3, 2)])
def test_the_gradient_of_a_step_ends_with_its_segments(
    make, tokenizer, long_corpus, settings, tmp_path, segments: int, reaches: int
) -> None:
    """What the loss of one segment has to say of the memory written behind those before it: nothing beyond a step."""
    loop = loops(make, tokenizer, long_corpus, settings, tmp_path, segments=segments)
    loop.model.train()
    stream, carry = iter(loop.stream), loop.carries[0]
    written: list[torch.Tensor] = []
    write = type(carry.states["tokens"]).write

    def kept(self: Any, states: torch.Tensor, *rest: Any) -> None:
        states.retain_grad()
        written.append(states)
        write(self, states, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(carry.states["tokens"]), "write", kept)
        loop.loss(loop.prepare(next(stream), 1), carry)
        loss, _ = loop.loss(loop.prepare(next(stream), 2), carry)
        loss.backward()
    assert len(written) == 2 * segments
    touched = [one.grad is not None and one.grad.abs().sum().item() > 0 for one in written]
    assert touched == [False] * segments + [True] * reaches + [False]
    assert not carry.states["tokens"].written.requires_grad


def test_segments_of_a_step_are_those_of_steps_of_one(make, tokenizer, long_corpus, settings, tmp_path) -> None:
    """Without learning the losses are the same, however many segments a step has."""
    found = []
    for segments in (1, 3):
        config = settings(steps=12 // segments, segments=segments, learning_rate=0.0, out=str(tmp_path / f"{segments}"))
        losses = [loss for _, loss in mnemic.train(make().double(), tokenizer, long_corpus, config).losses]
        found.append(sum(losses) * segments)
    assert found[0] == pytest.approx(found[1], rel=0.01)  # targets are not equally many in each segment


def test_a_memory_learns_what_stood_in_an_earlier_segment(make, tokenizer, settings, tmp_path) -> None:
    """The first letter of a document is its last, in its third segment, and segments of two tokens see no other way."""
    documents = [Document(letter, f"{letter}abcd{letter}") for letter in "xyzuvwXYZ"]
    corpus = Corpus("echo", {"train": lambda: documents})
    options = {"segment_length": 2, "segments": 4, "batch_size": 9, "steps": 400, "learning_rate": 1e-3}
    options |= {"schedule": "constant", "log_every": 50, "checkpoint_every": 500}
    letter = torch.log(torch.tensor(9.0)).item() / 7  # of seven targets the first and the last are any of nine letters
    found = {}
    for name, model in (("with", make(hidden_size=64)), ("without", make(hidden_size=64).memory.detach())):
        found[name] = mnemic.train(model, tokenizer, corpus, settings(**options, out=str(tmp_path / name))).losses[-1][
            1
        ]
    assert found["without"] == pytest.approx(2 * letter, rel=0.05)
    assert found["with"] < 1.75 * letter


def test_evaluation_leaves_the_memory_of_training_alone(long_corpus, tokenizer, make, settings, tmp_path) -> None:
    logs = []
    for every in (0, 2):
        config = settings(steps=8, segments=2, evaluate_every=every, out=str(tmp_path / f"{every}"))
        logs.append(mnemic.train(make(), tokenizer, long_corpus, config).losses)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("xl_length", [0, 8])
def test_perplexity_does_not_depend_on_the_batch(long_corpus, tokenizer, make, xl_length: int, batch_size: int) -> None:
    model = make(xl_length=xl_length).eval()
    results = [
        mnemic.evaluate(model, tokenizer, long_corpus, split="train", window=12, batch_size=size)["nll"]
        for size in (1, batch_size)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    with model.memory.disabled():
        assert abs(mnemic.evaluate(model, tokenizer, long_corpus, split="train", window=12)["nll"] - results[0]) > 0.1


def test_a_memory_remembers_how_long_the_segments_were(long_corpus, tokenizer, make, settings, tmp_path) -> None:
    run = mnemic.train(make(), tokenizer, long_corpus, settings(steps=1, segment_length=7, out=str(tmp_path / "run")))
    assert mnemic.load(run.out / "model").memory.tokens.config.segment == 7


def test_training_tells_that_what_is_written_learns_nothing(
    long_corpus, tokenizer, make, settings, tmp_path, capsys
) -> None:
    for segments in (1, 2):
        config = settings(steps=2, segments=segments, out=str(tmp_path / f"{segments}"))
        mnemic.train(make(), tokenizer, long_corpus, config)
        assert capsys.readouterr().err.count("no gradient reaches what recurrent memory tokens write") == (
            segments == 1
        )


def test_what_cannot_be_is_said(long_corpus, tokenizer, make, make_model, settings) -> None:
    with pytest.raises(UsageError, match="train with batching = documents"):
        mnemic.train(make(), tokenizer, long_corpus, settings(batching="shuffled"))
    read = make()
    read.memory.read(torch.tensor([[3, 4, 5]]))
    with pytest.raises(UsageError, match="the memory tokens have read a text"):
        mnemic.train(read, tokenizer, long_corpus, settings())
    with pytest.raises(UsageError, match="segments = 2 needs batching"):
        settings(batching="shuffled", segments=2)
    with pytest.raises(UsageError, match="a masked model does not read documents on"):
        mnemic.train(make_model("bert"), tokenizer, long_corpus, settings(segments=2, objective="auto"))
    with pytest.raises(UsageError, match="count = 0 is no memory"):
        mnemic.train(
            mnemic.augment(make_model("gpt2"), mnemic.MemoryTokens(count=0)), tokenizer, long_corpus, settings()
        )
