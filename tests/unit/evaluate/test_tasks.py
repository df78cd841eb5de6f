"""The figures of tasks: worked by hand, against scipy, and the same for any batch size."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import mnemic
from mnemic.data.tasks import Answer, Example, Task
from mnemic.errors import MnemicError, UsageError
from mnemic.evaluate.figures import FIGURES, answer_figures, normalised, shared_words
from mnemic.evaluate.tasks import best_span
from tests.unit.tasks import colours, counts, make_encoder, questions, reader, word_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def test_figures_of_labels_worked_by_hand():
    predicted, actual = np.array([1, 1, 1, 0, 0, 0, 0, 1]), np.array([1, 1, 0, 0, 0, 1, 0, 0])
    assert FIGURES["accuracy"](predicted, actual) == 5 / 8
    assert FIGURES["f1"](predicted, actual) == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))
    # true positives 2, true negatives 3, false positives 2, false negatives 1
    assert FIGURES["matthews"](predicted, actual) == pytest.approx((2 * 3 - 2 * 1) / np.sqrt(4 * 3 * 5 * 4))
    assert FIGURES["matthews"](predicted, actual) == pytest.approx(np.corrcoef(predicted, actual)[0, 1])
    assert FIGURES["matthews"](actual, actual) == 1.0
    assert FIGURES["matthews"](1 - actual, actual) == -1.0


def test_figures_of_scores_against_scipy_and_by_hand():
    draw = np.random.default_rng(0)
    predicted = draw.normal(size=50)
    actual = np.round(predicted + draw.normal(size=50), 0)  # with ties
    assert FIGURES["pearson"](predicted, actual) == scipy.stats.pearsonr(predicted, actual).statistic
    assert FIGURES["spearman"](predicted, actual) == scipy.stats.spearmanr(predicted, actual).statistic
    ranks = scipy.stats.rankdata(predicted), scipy.stats.rankdata(actual)
    assert FIGURES["spearman"](predicted, actual) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert FIGURES["spearman"](np.array([1.0, 2.0, 9.0]), np.array([3.0, 4.0, 5.0])) == pytest.approx(1)
    assert FIGURES["pearson"](np.array([1.0, 2.0, 9.0]), np.array([3.0, 4.0, 5.0])) == pytest.approx(0.917663)


@pytest.mark.parametrize("name", ["matthews", "pearson", "spearman"])
def test_a_model_that_always_says_the_same_has_no_correlation(name):
    assert FIGURES[name](np.ones(4), np.array([0, 1, 1, 0])) == 0.0


def test_f1_where_there_is_nothing_to_find():
    assert FIGURES["f1"](np.zeros(3), np.zeros(3)) == 0.0


def test_without_scipy_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UsageError, match=r"pip install 'mnemic\[tasks\]'"):
        FIGURES["pearson"](np.arange(3), np.arange(3))


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("The  Cat!", "cat"),
        ("a theatre, an anthem", "theatre anthem"),
        ("$4.5 million", "45 million"),
        ("well-known", "wellknown"),
        ("A", ""),
    ],
)
def test_answers_are_compared_without_what_does_not_matter(answer, plain):
    assert normalised(answer) == plain


@pytest.mark.parametrize(
    ("answer", "good", "f1"),
    [
        ("the cat", "Cat.", 1.0),
        ("black cat", "cat", 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "cat", 2 / 3),  # a word counts as often as it is there
        ("dog", "cat", 0.0),
        ("the", "a", 0.0),  # nothing in common, though both are empty
    ],
)
def test_words_in_common(answer, good, f1):
    assert shared_words(answer, good) == pytest.approx(f1)


def test_the_nearest_of_the_accepted_answers_counts():
    figures = answer_figures(["the black cat", "x"], [["dog", "cat", "Black cat"], ["y", "x z"]])
    assert figures == {"exact_match": 0.5, "f1": pytest.approx((1 + 2 / 3) / 2)}


def naive_span(starts: np.ndarray, ends: np.ndarray, longest: int) -> tuple[float, int, int]:
    count = len(starts)
    return max(
        (starts[first] + ends[last], -first, -last)
        for first in range(count)
        for last in range(first, min(first + longest, count))
    )


@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_best_span_is_the_best_of_all(longest):
    draw = np.random.default_rng(1)
    for count in (1, 2, 9, 40):
        starts, ends = draw.normal(size=count), draw.normal(size=count)
        score, first, last = best_span(starts, ends, longest)
        assert (score, -first, -last) == naive_span(starts, ends, longest)


# Models


def model_for(task: Task, tokenizer: Any, memory: bool = False, kind: str = "bert") -> Any:
    if task.kind == "spans":
        model = make_encoder(kind, tokenizer, "ForQuestionAnswering")
    else:
        model = make_encoder(kind, tokenizer, num_labels=len(task.labels) or 1)
    return mnemic.augment(model, mnemic.MemoryTokens(count=3)) if memory else model


@pytest.mark.parametrize("memory", [False, True], ids=["plain", "memory"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize("make", [colours, counts, questions], ids=["labels", "scores", "answers"])
def test_the_figures_do_not_depend_on_the_batch_size_and_nothing_is_changed(make, kind, memory, tokenizer):
    task = make(20)
    model = model_for(task, tokenizer, memory, kind).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    how = {"split": "train", "window": 14, "stride": 4}
    results = [mnemic.evaluate(model, tokenizer, task, batch_size=size, **how) for size in (1, 3, 50)]
    figures = [{name: result[name] for name in task.metrics} for result in results]
    assert figures[1] == pytest.approx(figures[0], abs=1e-6)
    assert figures[2] == pytest.approx(figures[0], abs=1e-6)
    assert results[0]["documents"] == 20
    assert (results[0]["metrics"], results[0]["window"]) == (["task"], 14)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_figures_are_those_of_one_example_at_a_time(tokenizer):
    task, model = colours(20), model_for(colours(), tokenizer).eval()
    examples = list(task.examples("train"))
    with torch.no_grad():
        given = [tokenizer(example.text, example.pair, return_tensors="pt") for example in examples]
        said = np.array([model(**one).logits.argmax().item() for one in given])
    actual = np.array([example.label for example in examples])
    assert 0 < (said == actual).mean() < 1
    found = mnemic.evaluate(model, tokenizer, task, split="train")
    assert {name: found[name] for name in task.metrics} == {name: FIGURES[name](said, actual) for name in task.metrics}


def test_the_best_span_over_all_windows_is_the_answer(tokenizer, monkeypatch):
    text = "the cat is red the sun is the dog is blue"
    examples = [Example("0", "where is the dog ?", text, answers=(Answer(text.index("dog"), "dog is blue"),))]
    task = Task("q", {"valid": reader(examples)}, metrics=("exact_match", "f1"), kind="spans")
    model = model_for(task, tokenizer)
    dog, blue = tokenizer.convert_tokens_to_ids(["dog", "blue"])

    def forward(input_ids: torch.Tensor, **others: Any) -> Any:
        later = torch.arange(input_ids.shape[1]) * 0.01
        return SimpleNamespace(
            start_logits=(input_ids == dog) * 5.0 + later, end_logits=(input_ids == blue) * 5.0 + later
        )

    monkeypatch.setattr(model, "forward", forward)
    # the question names a dog too, which is no answer; the window that has both words is neither the first nor alone
    for window, stride in ((14, 2), (13, 1), (40, 40)):
        found = mnemic.evaluate(model, tokenizer, task, window=window, stride=stride)
        assert (found["exact_match"], found["f1"]) == (1.0, 1.0)


def test_mnli_gives_both_parts(tokenizer):
    examples = list(colours(20).examples("train"))
    parts = {"valid": reader(examples[:9]), "valid_mismatched": reader(examples[9:])}
    task, model = Task("mnli", parts, ("other", "same")), model_for(colours(), tokenizer)
    found = mnemic.evaluate(model, tokenizer, task)
    alone = [mnemic.evaluate(model, tokenizer, task, split=part) for part in parts]
    assert found["accuracy_mismatched"] == alone[1]["accuracy"]
    first = mnemic.evaluate(model, tokenizer, Task("first", {"valid": parts["valid"]}, ("other", "same")))
    assert found["accuracy"] == alone[0]["accuracy"] == first["accuracy"]
    assert (found["documents"], first["documents"]) == (20, 9)
    assert mnemic.evaluate(model, tokenizer, task, max_documents=3)["documents"] == 6


def test_an_example_is_cut_to_128_tokens_or_what_the_model_can_read(tokenizer):
    task = colours(4)
    assert mnemic.evaluate(model_for(task, tokenizer), tokenizer, task)["window"] == 64
    large = make_encoder("bert", tokenizer, max_position_embeddings=512, num_labels=2)
    assert mnemic.evaluate(large, tokenizer, task)["window"] == 128
    asked = make_encoder("bert", tokenizer, "ForQuestionAnswering", max_position_embeddings=512)
    assert mnemic.evaluate(asked, tokenizer, questions(2))["window"] == 384


def test_what_cannot_be_measured_is_refused(tokenizer, make_model, corpus):
    model, task = model_for(colours(), tokenizer), colours()
    for options, message in (
        (
            {"metrics": ["perplexity"]},
            "perplexity is of language models: BertForSequenceClassification is measured with",
        ),
        ({"max_tokens": 5}, "max_tokens = 5 is of texts: in a task give max_documents"),
        ({"window": 65}, "window = 65, but BertForSequenceClassification has 64 positions"),
        ({"split": "test"}, "colours has no 'test' split: it has 'train', 'valid'"),
        ({"split": "tset"}, "colours has no 'tset' split"),
    ):
        with pytest.raises(UsageError, match=message):
            mnemic.evaluate(model, tokenizer, task, **options)
    with pytest.raises(UsageError, match="the metric 'task' is of tasks, which GPT2LMHeadModel has no head for"):
        mnemic.evaluate(make_model("gpt2"), tokenizer, corpus, metrics=["task"], window=8)
    model.classifier.weight.data.fill_(torch.nan)
    with pytest.raises(MnemicError, match="the model's outputs are not numbers"):
        mnemic.evaluate(model, tokenizer, task)
