"""How often the right token is among the nearest rows of a store (TRIME, arXiv 2205.12674, Table 13)."""

from __future__ import annotations

from typing import Any

from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import PairedText, Text
from mnemic.evaluate.perplexity import read_text, total_loss
from mnemic.memories.output.testing import Grid, Survey

DEPTHS = (1, 8, 64, 1024)


def retrieval_accuracy(model: Any, tokenizer: Any, text: Text | PairedText, config: EvaluateConfig) -> dict[str, Any]:
    """The share of tokens that are among the values of the 1, 8, 64 and 1024 nearest rows."""
    handle = getattr(getattr(model, "memory", None), "output", None)
    if handle is None or not handle.config.external:
        raise UsageError(
            "retrieval_accuracy is that of a store: give the model one with "
            "mnemic.augment(model, OutputMemory(external='docs.store'))"
        )
    surveys: list[Survey]
    with handle.surveying(Grid(longs=(), ks=DEPTHS)) as surveys:
        objective, batches = read_text(model, tokenizer, text, config)
        total_loss(objective, batches, text.tokens.target_count)
    found = Survey.joined(surveys).external
    shares = (found.target[0] > float("-inf")).double().mean(1).tolist() if found is not None else []
    return {"retrieval_accuracy": {str(k): share for k, share in zip(DEPTHS, shares, strict=True)}}
