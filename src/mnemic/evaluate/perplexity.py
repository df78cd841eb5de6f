"""Perplexity: each token of each document is scored exactly once, whatever the window, the stride and the batch.

A token is scored given what precedes it in its own document within the window. A model with an XL cache reads segments
of `window` tokens one after the other instead, and sees what its cache holds besides. A document always begins a
window or a segment, so that a token's context, and with it every figure, is the same for any batch size.

The end of a document is a token to predict too; it counts as a token, but not as a word, byte or character.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from mnemic.data import SlidingWindows, TokenizedCorpus
from mnemic.errors import MnemicError, UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import Text
from mnemic.hf.losses import IGNORED
from mnemic.train.objectives import Batch, NextToken, Objective, check_length, model_kind
from mnemic.train.terminal import progress_bar


def perplexity(model: Any, tokenizer: Any, text: Text, config: EvaluateConfig) -> dict[str, Any]:
    """The total negative log likelihood in nats, and what it is per token, word, byte and character."""
    if model_kind(model) != "causal":
        raise UsageError(
            f"perplexity is that of the next token, which {type(model).__name__} does not predict: "
            "measure it with metrics = ['masked_loss']"
        )
    objective = NextToken(model, tokenizer, config.seed)
    if objective.carries():
        if config.stride is not None and config.stride != config.window:
            raise UsageError(
                f"stride = {config.stride}: a model with an XL cache reads each segment of window = {config.window} "
                "tokens once, its cache is the overlap; leave stride unset"
            )
        batches = carried_segments(text.tokens, config.window, config.batch_size, objective)
    else:
        check_length(model, config.window, "window")
        windows = SlidingWindows(text.tokens, config.window, config.stride or config.window, config.batch_size)
        batches = ((batch, None) for batch in windows)
    nll, count = total_loss(objective, batches, text.tokens.target_count)
    if count != text.tokens.target_count:
        raise MnemicError(f"{count} of {text.tokens.target_count} tokens were scored: this is a mistake in mnemic")
    if not math.isfinite(nll):
        raise MnemicError(f"the loss is {nll}: {type(model).__name__} has weights that are not numbers, or too large")
    return {
        "nll": nll,
        "tokens": count,
        "words": text.words,
        "bytes": text.bytes,
        "characters": text.characters,
        "perplexity": _exp(nll / count),
        "word_perplexity": _exp(nll / text.words) if text.words else None,
        "byte_perplexity": _exp(nll / text.bytes),
        "bits_per_byte": nll / text.bytes / math.log(2),
        "bits_per_character": nll / text.characters / math.log(2),
    }


def total_loss(objective: Objective, batches: Iterator[tuple[Batch, Any]], targets: int | None) -> tuple[float, int]:
    """The sum of the losses of all targets, in double precision, and their number."""
    device = next(objective.model.parameters()).device
    total, count = 0.0, 0
    with progress_bar(targets, "token") as bar:
        for batch, carry in batches:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            total += objective.losses(batch, carry).cpu().double().sum().item()
            scored = int((batch["targets"] != IGNORED).sum())
            count += scored
            bar.update(scored)
    return total, count


def carried_segments(
    tokens: TokenizedCorpus, length: int, rows: int, objective: Objective
) -> Iterator[tuple[Batch, Any]]:
    """Batches in which each row reads a document segment by segment, with the carry to read it with.

    A row whose document has ended goes on with the next one at its next segment; when none is left it is dropped.
    """
    # The longest first: the rows end at about the same time
    waiting = iter(sorted(range(len(tokens)), key=tokens.length, reverse=True))
    reading = [(document, 0) for document in islice(waiting, rows)]
    carry = objective.new_carry(len(reading))
    while reading:
        yield _segments(tokens, length, reading), carry
        following = [_next_place(tokens, place, length, waiting) for place in reading]
        kept = [row for row, place in enumerate(following) if place is not None]
        if kept and len(kept) < len(reading):
            carry.batch_select_indices(torch.tensor(kept))
        reading = [place for place in following if place is not None]


def _next_place(
    tokens: TokenizedCorpus, place: tuple[int, int], length: int, waiting: Iterator[int]
) -> tuple[int, int] | None:
    document, start = place
    if start + length < tokens.length(document) - 1:  # the end token predicts nothing
        return document, start + length
    following = next(waiting, None)
    return None if following is None else (following, 0)


def _segments(tokens: TokenizedCorpus, length: int, places: list[tuple[int, int]]) -> Batch:
    """One segment for each (document, first token), padded on the right, in the form that DocumentStreams gives."""
    shape = len(places), length
    batch = {
        "input_ids": torch.full(shape, tokens.end_token),
        "targets": torch.full(shape, IGNORED),
        "document_starts": torch.zeros(shape, dtype=torch.bool),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    for row, (document, start) in enumerate(places):
        piece = torch.from_numpy(tokens.slice(document, start, start + length + 1))
        batch["input_ids"][row, : len(piece) - 1] = piece[:-1]
        batch["targets"][row, : len(piece) - 1] = piece[1:]
        batch["attention_mask"][row, : len(piece) - 1] = 1
        batch["document_starts"][row, 0] = start == 0
    return batch


def _exp(x: float) -> float | None:
    """e^x, or None where it is too large for a number (as per word, in a text without spaces)."""
    return math.exp(x) if x < 700 else None
