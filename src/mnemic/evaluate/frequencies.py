"""Perplexity by how often a token occurs in the text that is measured (TRIME, arXiv 2205.12674, Table 14)."""

from __future__ import annotations

import math
from typing import Any

import torch

from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import PairedText, Text
from mnemic.evaluate.perplexity import read_text, token_losses

BUCKETS = {">10k": 10_000, "1k-10k": 1_000, "100-1k": 100, "10-100": 10, "<=10": 0}  # occurrences, more than


def frequency_buckets(model: Any, tokenizer: Any, text: Text | PairedText, config: EvaluateConfig) -> dict[str, Any]:
    """The perplexity of the tokens of each bucket, and how many there are; None where there are none."""
    objective, batches = read_text(model, tokenizer, text, config)
    times, losses = (torch.zeros(len(tokenizer), dtype=torch.float64) for _ in range(2))
    for some, targets in token_losses(objective, batches, text.tokens.target_count):
        times += torch.bincount(targets, minlength=len(times))
        losses += torch.bincount(targets, some, minlength=len(times))
    found, above = dict[str, Any](), math.inf
    for name, least in BUCKETS.items():
        inside = (times > least) & (times <= above)
        count, above = int(times[inside].sum()), least
        mean = losses[inside].sum().item() / count if count else None
        found[name] = {"tokens": count, "perplexity": None if mean is None else math.exp(mean)}
    return {"frequency_buckets": found}
