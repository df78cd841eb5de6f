"""The loss of a masked model on hidden tokens: not a perplexity of the text, and not comparable with one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mnemic.data import SlidingWindows, TokenizedCorpus
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import Text
from mnemic.evaluate.perplexity import total_loss
from mnemic.train.objectives import Batch, Objective, check_length, make_objective


def masked_loss(model: Any, tokenizer: Any, text: Text, config: EvaluateConfig) -> dict[str, Any]:
    """The mean loss of tokens hidden as in training, in nats and as a perplexity of the hidden tokens.

    Which ones are hidden depends on the seed and the window alone.
    """
    objective = make_objective("masked", model, tokenizer, config.seed)
    check_length(model, config.text_window, "window")
    total, count = total_loss(objective, hidden_windows(text.tokens, config, objective), None)
    mean = total / count if count else None
    return {"masked_loss": mean, "masked_perplexity": mean and math.exp(mean), "masked_tokens": count}


def hidden_windows(
    tokens: TokenizedCorpus, config: EvaluateConfig, objective: Objective
) -> Iterator[tuple[Batch, Any]]:
    """Windows side by side over each document, with tokens hidden in each as if it were alone."""
    number = 0
    for batch in SlidingWindows(tokens, config.text_window, config.text_window, config.batch_size):
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            alone = {name: tensor[row : row + 1, :length] for name, tensor in batch.items()}
            for name, tensor in objective.prepare(alone, number).items():
                batch[name][row, :length] = tensor[0]
            number += 1
        yield batch, None
