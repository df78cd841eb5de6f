"""Perplexity: each token of each document is scored exactly once, whatever the window, the stride and the batch.

A token is scored given what precedes it in its own document within the window. A model with an XL cache reads segments
of `window` tokens one after the other instead, and sees what its cache holds besides; so does one with recurrent memory
tokens, unless a smaller stride is given. A document always begins a window or a segment, so that a token's context, and
with it every figure, is the same for any batch size; where an attention memory searches by lists, up to what these
find.

A model that translates reads pairs whole: the tokens of a target are scored, given its source and what precedes them.

The end of a document is a token to predict too; it counts as a token, but not as a word, byte or character.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mnemic.data import SlidingWindows, TokenizedCorpus
from mnemic.data.pair_batches import PairBatches
from mnemic.data.windows import Window
from mnemic.errors import MnemicError, UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import PairedText, Text
from mnemic.hf.losses import IGNORED
from mnemic.train.objectives import Batch, NextToken, Objective, check_length, model_kind
from mnemic.train.seq2seq import Seq2Seq, check_pairs
from mnemic.train.terminal import progress_bar


def perplexity(model: Any, tokenizer: Any, text: Text | PairedText, config: EvaluateConfig) -> dict[str, Any]:
    """The total negative log likelihood in nats, and what it is per token, word, byte and character."""
    if model_kind(model) == "masked":
        raise UsageError(
            f"perplexity is that of the next token, which {type(model).__name__} does not predict: "
            "measure it with metrics = ['masked_loss']"
        )
    objective, batches = read_text(model, tokenizer, text, config)
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


def read_text(
    model: Any, tokenizer: Any, text: Text | PairedText, config: EvaluateConfig
) -> tuple[Objective, Iterator[tuple[Batch, Any]]]:
    """How the model's losses are formed, and the batches of a text, each with the carry to read it with."""
    if isinstance(text, PairedText):
        return read_pairs(model, tokenizer, text, config)
    return read_documents(model, tokenizer, text, config)


def read_documents(
    model: Any, tokenizer: Any, text: Text, config: EvaluateConfig
) -> tuple[Objective, Iterator[tuple[Batch, Any]]]:
    """The batches of documents that score each token once, with the carry to read each with, for a causal model."""
    objective = NextToken(model, tokenizer, config.seed)
    stride = config.stride or text.window
    if objective.has_cache() and stride != text.window:
        raise UsageError(
            f"stride = {config.stride}: a model with an XL cache reads each segment of window = {text.window} "
            "tokens once, its cache is the overlap; leave stride unset"
        )
    if not objective.has_cache():
        check_length(model, text.window, "window")
    if objective.new_carry(1) is not None:
        return objective, carried_windows(text.tokens, text.window, stride, config.batch_size, objective)
    windows = SlidingWindows(text.tokens, text.window, stride, config.batch_size)
    return objective, ((batch, None) for batch in windows)


def read_pairs(
    model: Any, tokenizer: Any, text: PairedText, config: EvaluateConfig
) -> tuple[Objective, Iterator[tuple[Batch, Any]]]:
    """The batches of whole pairs, from the shortest to the longest, for a model that translates."""
    objective, pairs = Seq2Seq(model, tokenizer, config.seed), text.tokens
    check_pairs(model, pairs)
    batches = PairBatches(pairs, config.batch_size, int(pairs.lengths.max()), shuffle=False, epochs=1)
    return objective, ((objective.prepare(batch, 0), None) for batch in batches)


def total_loss(objective: Objective, batches: Iterator[tuple[Batch, Any]], targets: int | None) -> tuple[float, int]:
    """The sum of the losses of all targets, in double precision, and their number."""
    total, count = 0.0, 0
    for losses, found in token_losses(objective, batches, targets):
        total, count = total + losses.sum().item(), count + len(found)
    return total, count


def token_losses(
    objective: Objective, batches: Iterator[tuple[Batch, Any]], targets: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The losses of the targets of each batch, in double precision, and the targets: (N,) each."""
    device = next(objective.model.parameters()).device
    with progress_bar(targets, "token") as bar:
        for batch, carry in batches:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            losses, scored = objective.losses(batch, carry), batch["targets"] != IGNORED
            yield losses[scored].cpu().double(), batch["targets"][scored].cpu()
            bar.update(int(scored.sum()))


def carried_windows(
    tokens: TokenizedCorpus, window: int, stride: int, rows: int, objective: NextToken
) -> Iterator[tuple[Batch, Any]]:
    """Batches in which each row reads a document window by window, with the carry to read it with.

    A row whose document has ended goes on with the next one at its next window; when none is left it is dropped.
    """
    windows = SlidingWindows(tokens, window, stride, rows)
    memory = objective.memory
    segments = objective.has_cache() or (stride == window and memory is not None and memory.writes)

    def of_document(document: int) -> Iterator[Window]:
        for _, start, first, end in windows.of_document(document):
            yield document, first if segments else start, first, end  # else its context is carried

    # The longest first: the rows end at about the same time
    waiting = iter(sorted((d for d in range(len(tokens)) if tokens.length(d) > 1), key=tokens.length, reverse=True))
    reading = [of_document(document) for document in islice(waiting, rows)]
    carry = objective.new_carry(len(reading))
    places = [next(row) for row in reading]
    while places:
        batch = windows.batch(places)
        batch["document_starts"][:, 0] = torch.tensor([first == 0 for _, _, first, _ in places])
        yield batch, carry
        following = []
        for number, row in enumerate(reading):
            place = next(row, None)
            if place is None and (document := next(waiting, None)) is not None:
                reading[number] = of_document(document)
                place = next(reading[number])
            following.append(place)
        kept = [row for row, place in enumerate(following) if place is not None]
        if carry is not None and kept and len(kept) < len(reading):
            carry.batch_select_indices(torch.tensor(kept))
        reading, places = [reading[row] for row in kept], [place for place in following if place is not None]


def _exp(x: float) -> float | None:
    """e^x, or None where it is too large for a number (as per word, in a text without spaces)."""
    return math.exp(x) if x < 700 else None
