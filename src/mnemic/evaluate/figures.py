"""The figures of tasks, as their benchmarks define them: shares and correlations, 1 is perfect."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mnemic.errors import UsageError


def accuracy(predicted: np.ndarray, actual: np.ndarray) -> float:
    """The share of examples that are given their own label."""
    return float((predicted == actual).mean())


def f1(predicted: np.ndarray, actual: np.ndarray) -> float:
    """The harmonic mean of precision and recall of label 1; 0 where nothing has it and nothing is given it."""
    both = int(((predicted == 1) & (actual == 1)).sum())
    return 2 * both / max(int((predicted == 1).sum() + (actual == 1).sum()), 1)


def matthews(predicted: np.ndarray, actual: np.ndarray) -> float:
    """Matthews' correlation of labels 0 and 1; 0 where it is not defined, when either has one label only."""
    cells = [int(((predicted == ours) & (actual == theirs)).sum()) for ours in (0, 1) for theirs in (0, 1)]
    neither, missed, wrong, both = cells
    sides = (both + wrong) * (both + missed) * (neither + wrong) * (neither + missed)
    return (both * neither - wrong * missed) / math.sqrt(sides) if sides else 0.0


def pearson(predicted: np.ndarray, actual: np.ndarray) -> float:
    """The correlation of the scores; 0 where it is not defined, when either are all the same."""
    return _correlation("pearsonr", predicted, actual)


def spearman(predicted: np.ndarray, actual: np.ndarray) -> float:
    """The correlation of the scores' ranks; 0 where it is not defined, when either are all the same."""
    return _correlation("spearmanr", predicted, actual)


FIGURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def _correlation(name: str, predicted: np.ndarray, actual: np.ndarray) -> float:
    if len(set(predicted.tolist())) < 2 or len(set(actual.tolist())) < 2:
        return 0.0
    return float(getattr(_stats(), name)(predicted, actual).statistic)


def _stats() -> Any:
    try:
        import scipy.stats
    except ImportError:
        raise UsageError("correlations need the package scipy: pip install 'mnemic[tasks]'") from None
    return scipy.stats


# Answers to questions, as SQuAD's evaluate-v1.1.py compares them

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """An answer in lower case, without punctuation, articles and spare spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def answer_figures(predicted: Sequence[str], accepted: Sequence[Sequence[str]]) -> dict[str, float]:
    """The means of exact match and of F1 over questions, each answer compared with the accepted one nearest to it."""
    pairs = list(zip(predicted, accepted, strict=True))
    exact = [max(float(normalised(answer) == normalised(good)) for good in goods) for answer, goods in pairs]
    words = [max(shared_words(answer, good) for good in goods) for answer, goods in pairs]
    return {"exact_match": sum(exact) / len(pairs), "f1": sum(words) / len(pairs)}


def shared_words(answer: str, good: str) -> float:
    """F1 of the words of an answer, as a bag."""
    ours, theirs = normalised(answer).split(), normalised(good).split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0
