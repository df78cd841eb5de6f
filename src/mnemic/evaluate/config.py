"""The settings of an evaluation, and the names of the metrics; importing it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mnemic.config import Config, option
from mnemic.errors import UsageError, unknown_name
from mnemic.registry import Registry

WINDOW = 512
METRICS = Registry(
    "metric",
    {
        "perplexity": "mnemic.evaluate.perplexity:perplexity",
        "masked_loss": "mnemic.evaluate.masked:masked_loss",
        "bleu": "mnemic.evaluate.translation:bleu",
        "task": "mnemic.evaluate.tasks:task_figures",
        "frequency_buckets": "mnemic.evaluate.frequencies:frequency_buckets",
        "retrieval_accuracy": "mnemic.evaluate.retrieval:retrieval_accuracy",
        "memory_usage": "mnemic.evaluate.usage:memory_usage",
    },
)


@dataclass(kw_only=True)
class EvaluateConfig(Config):
    """What to measure, and how a document is cut for it."""

    metrics: list[str] = option(
        ["auto"],
        "what to measure: perplexity, masked_loss, bleu, task, frequency_buckets, retrieval_accuracy, memory_usage; "
        "auto is what the model was made for",
    )
    split: str = option("valid", "the part of the corpus to measure on: train, valid, test or all")
    window: int | None = option(
        None,
        "tokens that the model reads at once; unset: 512, with recurrent memory tokens their segment, of an example in "
        "a task 128, with a question 384",
    )
    stride: int | None = option(
        None,
        "tokens by which a window moves on, and which it scores; unset: the whole window, in questions 128",
    )
    batch_size: int = option(
        8,
        "windows, rows of an XL cache, or pairs at once; figures do not depend on it, but by a hair where an attention "
        "memory searches by lists",
    )
    max_documents: int | None = option(None, "read no more documents than this")
    max_tokens: int | None = option(None, "stop after the document that brings the number of tokens to this or more")
    beams: int = option(4, "beams of the search for a translation, in bleu; 1 is greedy search")
    max_new_tokens: int = option(200, "tokens of a translation at most, in bleu")
    seed: int = option(0, "of the choice of hidden tokens in masked_loss")

    def check(self) -> None:
        """Raises UsageError for a value out of range or a name that does not exist."""
        for name in ("window", "stride", "batch_size", "max_documents", "max_tokens", "beams", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"EvaluateConfig.{name} = {value}: expected 1 or more")
        if self.stride is not None and self.stride > self.text_window:
            raise UsageError(
                f"EvaluateConfig.stride = {self.stride} is more than window = {self.text_window}: "
                "tokens would be left out"
            )
        if not self.metrics:
            raise UsageError(f"EvaluateConfig.metrics is empty: choose from {', '.join(METRICS)}")
        for metric in self.metrics:
            if metric not in (known := ("auto", *METRICS)):
                raise unknown_name("metric", metric, known)

    @property
    def text_window(self) -> int:
        """Tokens of a text that the model reads at once."""
        return WINDOW if self.window is None else self.window
