"""Translation: predict a target, token by token, from its source."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemic.data.pair_batches import PairBatches, TokenizedPairs, tokenize_pairs
from mnemic.data.pairs import ParallelCorpus
from mnemic.errors import UsageError
from mnemic.hf.losses import IGNORED, token_losses
from mnemic.train.config import TrainConfig
from mnemic.train.objectives import Batch, Objective


class Seq2Seq(Objective):
    """Predict each token of a target from its source and from the target's tokens before it."""

    kind = "seq2seq"
    stream = PairBatches

    def __init__(self, model: Any, tokenizer: Any, seed: int, label_smoothing: float = 0.0) -> None:
        super().__init__(model, tokenizer, seed)
        self.label_smoothing = label_smoothing
        self.keeps_documents_apart = True  # a row is one pair
        self.start = decoder_start(model)
        self.padding = padding_token(model, tokenizer)

    def tokenize(self, corpus: Any, split: str, folder: Path, config: TrainConfig) -> TokenizedPairs:
        """The token ids of the pairs of a split, written to a folder."""
        return tokenize_pairs(partial(check_parallel(corpus).pairs, split), self.tokenizer, folder)

    def open_tokens(self, folder: Path) -> TokenizedPairs:
        """What `tokenize` wrote to a folder."""
        return TokenizedPairs.open(folder)

    def prepare(self, batch: Batch, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Adds what the decoder reads: the targets one step to the right, behind the model's start token."""
        before = F.pad(batch["targets"][:, :-1], (1, 0), value=self.start)
        return {
            **batch,
            "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, self.padding),
            "decoder_input_ids": before.masked_fill(before == IGNORED, self.padding),
        }

    def inputs(self, batch: Batch, carry: Any = None) -> dict[str, Any]:
        """What the model's forward takes; padding of the target is after all that could see it and needs no mask."""
        inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
        if not batch["attention_mask"].all():
            inputs["attention_mask"] = batch["attention_mask"]
        return inputs

    def losses(self, batch: Batch, carry: Any) -> Tensor:
        """The negative log likelihood of the targets; in training with a share of label smoothing, if there is any.

        Smoothed, a target's loss is (1 - s) times its own and s times the mean over the vocabulary (arXiv:1512.00567).
        A memory at the output is in the target's own loss; the mean is that of the model's softmax without it.
        """
        targets = batch["targets"]
        losses, outputs = token_losses(self.model, targets, use_cache=False, **self.inputs(batch))
        if not (self.label_smoothing and self.model.training):
            return losses
        logits = getattr(outputs, "logits", None)
        if logits is None:
            raise UsageError(
                f"label_smoothing = {self.label_smoothing}: {type(self.model).__name__} gives no logits of the whole "
                "vocabulary in training; leave it at 0"
            )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        everywhere = logits.logsumexp(-1) - logits.mean(-1)
        smoothed = (1 - self.label_smoothing) * losses + self.label_smoothing * everywhere
        return smoothed.masked_fill(targets == IGNORED, 0)


def check_parallel(corpus: Any) -> ParallelCorpus:
    """The corpus; UsageError if it has no pairs."""
    if not isinstance(corpus, ParallelCorpus):
        raise UsageError(
            f"{corpus.name} is not a parallel corpus, which a sequence-to-sequence model reads: give a folder with "
            "files such as train.de and train.en"
        )
    return corpus


def decoder_start(model: Any) -> int:
    """The token that the decoder of a model starts with."""
    for config in (model.config, model.generation_config):
        if (start := getattr(config, "decoder_start_token_id", None)) is not None:
            return start
    raise UsageError(
        f"{type(model).__name__} does not say with which token its decoder starts: set "
        "model.config.decoder_start_token_id, usually to the id of the padding or of the end token"
    )


def padding_token(model: Any, tokenizer: Any) -> int:
    """The token to pad with; masks hide it."""
    ids = model.config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
    return next(id for id in ids if id is not None)


def check_pairs(model: Any, pairs: TokenizedPairs) -> None:
    """UsageError if a pair has more tokens than a model has positions."""
    most = getattr(model.config, "max_position_embeddings", None)
    longest = pairs.lengths.max(axis=1)
    if most is not None and longest.max() > most:
        number = int(longest.argmax())
        raise UsageError(
            f"{pairs.target.id(number)} and its source have up to {longest[number]} tokens, but "
            f"{type(model).__name__} has {most} positions: leave this pair out"
        )
