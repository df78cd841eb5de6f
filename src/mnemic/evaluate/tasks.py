"""How well a model does a task: its labels, scores and answers, compared with the right ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mnemic.data.examples import ExampleBatches, Row, TokenizedExamples, rows_of
from mnemic.data.tasks import Example
from mnemic.errors import MnemicError, UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import TaskText
from mnemic.evaluate.figures import FIGURES, answer_figures
from mnemic.train.objectives import Batch, make_objective
from mnemic.train.tasks import TaskObjective
from mnemic.train.terminal import progress_bar

LONGEST = 30  # tokens of an answer at most, as in BERT


def task_figures(model: Any, tokenizer: Any, text: Any, config: EvaluateConfig) -> dict[str, Any]:
    """The task's own figures; those of a second part of the split are named after it, as accuracy_mismatched."""
    if not isinstance(text, TaskText):
        raise UsageError(
            f"the metric 'task' is of tasks, which {type(model).__name__} has no head for: see mnemic.with_head"
        )
    objective: Any = make_objective("auto", model, tokenizer, config.seed)
    found: dict[str, Any] = {}
    for part, examples in text.parts.items():
        rows = list(rows_of(examples, text.task, tokenizer, text.window, text.stride))
        if text.task.kind == "spans":
            answers = answers_of(objective, rows, examples, config.batch_size)
            accepted = [[answer.text for answer in example.answers] for example in examples]
            figures = answer_figures(answers, accepted)
        else:
            predicted = predictions(objective, rows, config.batch_size)
            if text.task.labels:
                predicted = predicted.argmax(axis=1)
            actual = np.array([example.label for example in examples])
            figures = {name: FIGURES[name](predicted.reshape(len(rows)), actual) for name in text.task.metrics}
        found |= {f"{name}_{part}" if part else name: figure for name, figure in figures.items()}
    return found


def predictions(objective: TaskObjective, rows: list[Row], batch_size: int) -> np.ndarray:
    """The logits of each row, (N, labels), in double precision."""
    found = np.empty((len(rows), objective.model.config.num_labels))
    for batch, outputs in read_rows(objective, rows, batch_size):
        real = batch["row"] >= 0
        found[batch["row"][real].numpy()] = _numbers(outputs.logits)[real.numpy()]
    return found


def answers_of(objective: TaskObjective, rows: list[Row], examples: list[Example], batch_size: int) -> list[str]:
    """The answer to each question: of all spans of all its windows, the one with the highest sum of logits."""
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(examples)
    for batch, outputs in read_rows(objective, rows, batch_size):
        starts, ends = _numbers(outputs.start_logits), _numbers(outputs.end_logits)
        for place, number in enumerate(batch["row"].tolist()):
            row = rows[number] if number >= 0 else None
            if row is None or not len(row.borders):
                continue
            window = slice(row.place, row.place + len(row.borders))
            score, first, last = best_span(starts[place, window], ends[place, window])
            if score > best[row.example][0]:
                context = examples[row.example].pair or ""
                best[row.example] = score, context[row.borders[first, 0] : row.borders[last, 1]]
    return [answer for _, answer in best]


def best_span(starts: np.ndarray, ends: np.ndarray, longest: int = LONGEST) -> tuple[float, int, int]:
    """The highest sum of a start and an end that is not before it, nor makes a span of more than `longest` tokens."""
    sums = starts[:, None] + ends[None, :]
    allowed = np.triu(np.tri(len(starts), k=longest - 1, dtype=bool))
    first, last = np.unravel_index(np.where(allowed, sums, -np.inf).argmax(), sums.shape)
    return float(sums[first, last]), int(first), int(last)


def read_rows(objective: TaskObjective, rows: list[Row], batch_size: int) -> Iterator[tuple[Batch, Any]]:
    """Each batch of rows, and what the model says of it."""
    device = next(objective.model.parameters()).device
    longest = max(len(row.tokens) for row in rows)
    with progress_bar(len(rows), "example") as bar:
        batches = ExampleBatches(TokenizedExamples.of(rows), batch_size, max(longest, 1), shuffle=False, epochs=1)
        for batch in batches:
            ready = {name: tensor.to(device) for name, tensor in objective.prepare(batch, 0).items()}
            yield batch, objective.outputs(ready)
            bar.update(int((batch["row"] >= 0).sum()))


def _numbers(logits: Tensor) -> np.ndarray:
    if not torch.isfinite(logits).all():
        raise MnemicError("the model's outputs are not numbers: it has weights that are not, or too large")
    return logits.double().cpu().numpy()
