"""How a product-key memory is used while a text is read (arXiv 2010.03881, section 3.2)."""

from __future__ import annotations

from typing import Any

from mnemic.errors import UsageError
from mnemic.evaluate.config import METRICS, EvaluateConfig
from mnemic.evaluate.evaluation import USUAL, PairedText, TaskText, Text
from mnemic.memories.product_keys.usage import Usage
from mnemic.train.objectives import model_kind


def count_usage(model: Any, tokenizer: Any, text: Text | PairedText | TaskText, config: EvaluateConfig) -> Usage:
    """Reads a text and counts the slots that it reads."""
    handle = getattr(getattr(model, "memory", None), "product_keys", None)
    if handle is None:
        raise UsageError("memory_usage is that of product keys: give the model some, see ProductKeys")
    read: Any = METRICS.load(USUAL[model_kind(model)])
    with handle.counting() as usage:
        read(model, tokenizer, text, config)
    return usage


def memory_usage(
    model: Any, tokenizer: Any, text: Text | PairedText | TaskText, config: EvaluateConfig
) -> dict[str, Any]:
    """MU, top-1 MU, KL_u and KL_w of each layer with product keys."""
    figures = count_usage(model, tokenizer, text, config).figures()
    return {"memory_usage": {str(layer): found for layer, found in figures.items()}}
