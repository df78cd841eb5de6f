"""Training with an attention memory: it is part of a run's state, and evaluation has one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mnemic
from mnemic.data import Document
from mnemic.data.documents import Corpus
from mnemic.memories.attention import search as searching
from mnemic.memories.attention.reading import Forward
from mnemic.train.carries import join_rows, take_rows
from tests.unit.train.test_resume import Stop, stop_at


@pytest.fixture
def long_corpus() -> Corpus:
    """Documents of several segments, of different lengths."""
    words = [
        "a",
        "memory",
        "keeps",
        "what",
        "was",
        "read",
        "and",
        "gives",
        "it",
        "back",
        "when",
        "it",
        "is",
        "asked",
        "for",
    ]
    documents = [
        Document(str(n), " ".join(words[(n * i + i // 7) % len(words)] for i in range(12 + 7 * n))) for n in range(9)
    ]
    return Corpus("long", {"train": lambda: documents[:7], "valid": lambda: documents[7:]})


@pytest.fixture
def make(make_model: Callable[..., Any]) -> Callable[..., Any]:
    def made(kind: str = "decoder", xl_length: int = 8, **memory: Any) -> Any:
        options = {"xl_length": xl_length, "dropout": 0.0} if kind == "decoder" else {}
        settings = {"layers": [0], "k": 4, "size": 20, **memory}
        return mnemic.augment(make_model(kind, **options), mnemic.KNNAttention(**settings))

    return made


@pytest.fixture(params=["exact", "lists"])
def search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a small memory is searched."""
    monkeypatch.setattr(searching, "FEWEST", 30)
    monkeypatch.setattr(searching, "PENDING", 16)
    monkeypatch.setattr(searching, "STALE", 3)
    return request.param


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("kind", "xl_length", "size"), [("decoder", 8, 90), ("decoder", 8, 35), ("decoder", 0, 90), ("gpt2", 0, 90)]
)
def test_stopped_and_resumed_is_never_stopped(
    long_corpus, tokenizer, make, settings, tmp_path, kind, xl_length, size, accumulate, search
) -> None:
    options = {"steps": 12, "checkpoint_every": 2, "evaluate_every": 5, "accumulate": accumulate}
    straight = settings(**options, out=str(tmp_path / "straight"))
    expected = mnemic.train(make(kind, xl_length, search=search, size=size), tokenizer, long_corpus, straight)
    stopped = settings(**options, out=str(tmp_path / "stopped"), resume=True)
    for last in (3, 7, 8):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, last)
            with pytest.raises(Stop):
                mnemic.train(make(kind, xl_length, search=search, size=size), tokenizer, long_corpus, stopped)
    got = mnemic.train(make(kind, xl_length, search=search, size=size), tokenizer, long_corpus, stopped)
    assert got.losses == expected.losses


def test_the_memory_matters_and_is_each_rows_own(long_corpus, tokenizer, make, settings, tmp_path) -> None:
    """Batches cut in pieces give the same gradient: no row looks into another's memory."""
    losses = []
    for number, options in enumerate(({"accumulate": 1}, {"accumulate": 4}, {"accumulate": 1, "size": 1})):
        model = make(size=options.pop("size", 200)).double()
        config = settings(**options, clip=0.0, steps=8, out=str(tmp_path / str(number)))
        losses.append([loss for _, loss in mnemic.train(model, tokenizer, long_corpus, config).losses])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-4)


def test_evaluation_leaves_the_memory_of_training_alone(
    long_corpus, tokenizer, make, settings, tmp_path, search
) -> None:
    logs = []
    for every in (0, 2):
        config = settings(steps=8, evaluate_every=every, out=str(tmp_path / f"{every}"))
        run = mnemic.train(make(search=search, size=90), tokenizer, long_corpus, config)
        logs.append(run.losses)
    assert logs[0] == logs[1]


def test_only_gates_and_scales_are_trained_if_asked(long_corpus, tokenizer, make, settings) -> None:
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mnemic.train(model, tokenizer, long_corpus, settings(trainable="memory", steps=8))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"memory.attention.layers.0.gate", "memory.attention.layers.0.log_scale"}


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_perplexity_does_not_depend_on_the_batch(long_corpus, tokenizer, make, batch_size: int) -> None:
    model = make().eval()
    results = [
        mnemic.evaluate(model, tokenizer, long_corpus, split="train", window=12, batch_size=size)["nll"]
        for size in (1, batch_size)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    with model.memory.disabled():
        assert abs(mnemic.evaluate(model, tokenizer, long_corpus, split="train", window=12)["nll"] - results[0]) > 0.1


def test_windows_that_overlap_count_no_token_twice(long_corpus, tokenizer, make) -> None:
    """With the whole document in memory or context, a dense joint memory sees the same whatever the overlap."""
    model = make("gpt2", mix="joint", dense=True, size=500, layers=[0]).eval()
    state_sizes = []
    for stride in (12, 5):
        seen: list[int] = []
        commit = Forward.commit

        def counting(self: Any, commit: Any = commit, seen: list[int] = seen) -> None:
            commit(self)
            seen.append(self.state.memories[0].rows[0].count)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Forward, "commit", counting)
            mnemic.evaluate(model, tokenizer, long_corpus, split="valid", window=12, stride=stride, batch_size=1)
        state_sizes.append(max(seen))
    assert state_sizes[0] == state_sizes[1]


def test_rows_that_hold_less_are_filled_up_where_parts_meet() -> None:
    parts = [
        {"keys": torch.ones(1, 2, 3, 4), "n": torch.tensor(5)},
        {"keys": torch.ones(2, 2, 5, 4), "n": torch.tensor(5)},
    ]
    joined = join_rows(parts)
    assert joined["keys"].shape == (3, 2, 5, 4)
    assert joined["keys"][0, :, 3:].abs().sum() == 0
    torch.testing.assert_close(take_rows(joined, 1, 2)["keys"], parts[1]["keys"])
