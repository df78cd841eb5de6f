"""What a model learns: the loss of a batch as a sum over targets and their count.

Sums and counts, never means: however a batch is cut or padded, each target then weighs the same.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mnemic.augment import AugmentedModel
from mnemic.data import DocumentStreams, TokenizedCorpus, tokenize_corpus
from mnemic.data.tasks import Task
from mnemic.errors import UsageError
from mnemic.hf.documents import can_separate_documents, documents_apart
from mnemic.hf.losses import IGNORED, masked_token_losses, token_losses
from mnemic.hf.positions import positions
from mnemic.train.carries import Carry
from mnemic.train.config import OBJECTIVES, TrainConfig

Batch = dict[str, Tensor]
_USUAL = {
    "causal": "next-token",
    "masked": "masked",
    "seq2seq": "seq2seq",
    "classification": "classification",
    "spans": "spans",
}
_TASK_HEADS = {"ForSequenceClassification": "classification", "ForQuestionAnswering": "spans"}


class Objective(ABC):
    """One way to train: how a batch is prepared, and its loss."""

    kind: ClassVar[str]  # of the models it suits: one of those that `model_kind` names
    stream: ClassVar[type] = DocumentStreams  # what makes batches of the tokens

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        self.model, self.memory = model, model.memory if isinstance(model, AugmentedModel) else None
        self.tokenizer = tokenizer
        self.seed = seed
        self.accepts = frozenset(inspect.signature(model.forward).parameters)
        self.keeps_documents_apart = "document_starts" in self.accepts

    def tokenize(self, corpus: Any, split: str, folder: Path, config: TrainConfig) -> Any:
        """The token ids of a split, written to a folder."""
        refuse_task(corpus, self.model)
        return tokenize_corpus(corpus.documents(split), self.tokenizer, folder)

    def open_tokens(self, folder: Path) -> Any:
        """What `tokenize` wrote to a folder."""
        return TokenizedCorpus(folder)

    def prepare(self, batch: Batch, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The batch as this objective reads it; the same for the same seed and step.

        With several processes it is the part of this one, and is made what it would be as a part of the whole.
        """
        return batch

    def check_batching(self, batching: str) -> None:
        """UsageError if batches other than documents read in order do not suit the model."""
        if self.kind == "seq2seq" and batching != "similar":
            raise UsageError(
                f"batching = {batching!r} is of the segments of a text: pairs are batched by their length with "
                "'documents', or by what their targets have in common with 'similar'"
            )
        if self.has_cache():
            raise UsageError(
                f"batching = {batching!r}: a model with an XL cache reads on from batch to batch, use 'documents'"
            )

    def has_cache(self) -> bool:
        """Whether the model has a cache of its own that outlives a segment."""
        if self.memory is not None:
            return self.memory.xl_length > 0
        return getattr(self.model.config, "xl_length", 0) > 0

    def begin_step(self, step: int, steps: int) -> None:
        """Tells the model's memories how far training is, before each step."""
        if self.memory is not None:
            self.memory.begin_step(step, steps)

    def new_carry(self, rows: int) -> Any:
        """A fresh carry from segment to segment for a batch of `rows` rows, or None if the model has none.

        Its `tensors()`, which `load_tensors` puts back, have a row for each row of the batch, or are single numbers.
        """
        return None

    @abstractmethod
    def losses(self, batch: Batch, carry: Any) -> Tensor:
        """The loss of each target, in the shape of these, 0 where there is none; moves `carry` on."""

    def loss(self, batch: Batch, carry: Any) -> tuple[Tensor, int]:
        """The sum of the losses of a batch's targets, and how many targets there are; moves `carry` on."""
        return self.losses(batch, carry).sum(), int((batch["targets"] != IGNORED).sum())

    def inputs(self, batch: Batch, carry: Any = None) -> dict[str, Any]:
        """Those tensors of the batch that the model's forward takes and that say anything.

        A mask that masks nothing is left out, and so are document starts that are only where a row begins anyway:
        models are faster without.
        """
        names = ["input_ids"]
        if not batch["attention_mask"].all():
            names.append("attention_mask")
        starts = batch["document_starts"] if "streams" in batch else batch["document_starts"][:, 1:]
        if carry is not None or starts.any():
            names.append("document_starts")
        return {name: batch[name] for name in names if name in self.accepts}


class NextToken(Objective):
    """Predict each next token of documents that are read in order; an XL cache carries over from segment to segment."""

    kind = "causal"

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        super().__init__(model, tokenizer, seed)
        # a plain model is to read documents as one with a memory does, or the two could not be compared
        self.needs_help = not self.keeps_documents_apart and can_separate_documents(model)
        self.keeps_documents_apart |= self.needs_help

    def new_carry(self, rows: int) -> Carry | None:
        """The model's XL cache and what its memories keep of a text, if there is any such thing."""
        states = self.memory.new_state(rows) if self.memory is not None else {}
        if not self.has_cache() and not states:
            return None
        owner = self.model if self.memory is None else self.memory
        return Carry(owner.new_cache(rows) if self.has_cache() else None, states)

    def losses(self, batch: Batch, carry: Any) -> Tensor:
        """The negative log likelihood of the targets."""
        inputs = self.inputs(batch, carry)
        if carry is not None and carry.cache is not None:
            inputs |= {"past_key_values": carry.cache, "use_cache": True}
        elif "use_cache" in self.accepts:
            inputs["use_cache"] = False
        if self.memory is not None:
            inputs |= {"streams": batch.get("streams"), "memory_state": carry.states if carry is not None else None}
            if carry is not None:  # also where the model itself cannot keep documents apart
                inputs["document_starts"] = batch["document_starts"]
        starts = batch["document_starts"]
        if self.needs_help and starts[:, 1:].any():
            with documents_apart(self.model, starts):
                return token_losses(self.model, batch["targets"], **inputs)[0]
        return token_losses(self.model, batch["targets"], **inputs)[0]


class Masked(Objective):
    """Guess hidden tokens from both sides, as BERT does (arXiv:1810.04805, section 3.1)."""

    kind = "masked"
    chosen = 0.15  # of the tokens are targets; of these
    hidden = 0.8  # become the mask token,
    swapped = 0.1  # become a random token, and the rest stay as they are

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        super().__init__(model, tokenizer, seed)
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "the masked objective needs a tokenizer with a mask token: use that of a masked model, or add one with "
                "tokenizer.add_special_tokens({'mask_token': '[MASK]'}) and model.resize_token_embeddings"
            )
        self.special = torch.tensor(sorted(set(tokenizer.all_special_ids)))

    def prepare(self, batch: Batch, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Hides tokens, chosen by seed and step alone, and makes those that were there the targets."""
        tokens = batch["input_ids"]
        rows, length = tokens.shape
        own, everyone = slice(rank * rows, (rank + 1) * rows), (world_size * rows, length)
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        open_to_choice = batch["attention_mask"].bool() & ~torch.isin(tokens, self.special)
        chosen = (torch.rand(everyone, generator=draw)[own] < self.chosen) & open_to_choice
        fate = torch.rand(everyone, generator=draw)[own]
        others = torch.randint(len(self.tokenizer), everyone, generator=draw)[own]
        shown = torch.where(chosen & (fate < self.hidden), self.tokenizer.mask_token_id, tokens)
        swap = chosen & (fate >= self.hidden) & (fate < self.hidden + self.swapped)
        return {
            **batch,
            "input_ids": torch.where(swap, others, shown),
            "targets": torch.where(chosen, tokens, IGNORED),
        }

    def losses(self, batch: Batch, carry: Any) -> Tensor:
        """The negative log likelihood of the tokens that were hidden."""
        return masked_token_losses(self.model, batch["targets"], **self.inputs(batch))


def make_objective(name: str, model: Any, tokenizer: Any, seed: int, label_smoothing: float = 0.0) -> Objective:
    """The objective called `name`, which must suit the model; "auto" is what the model was made for."""
    kind = model_kind(model)
    objective: type[Objective] = OBJECTIVES.load(_USUAL[kind] if name == "auto" else name)
    if objective.kind != kind:
        raise UsageError(
            f"objective {name!r} is for {objective.kind} models and {type(model).__name__} is a {kind} one: "
            f"use {_USUAL[kind]!r} or 'auto'"
        )
    check_vocabulary(model, tokenizer)
    if label_smoothing and kind != "seq2seq":
        raise UsageError(f"label_smoothing = {label_smoothing}: only sequence-to-sequence models are trained with it")
    smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
    return objective(model, tokenizer, seed, **smoothing)


def model_kind(model: Any) -> str:
    """ "causal", "masked", "seq2seq", "classification" or "spans", by the model's head; UsageError if it has none."""
    for head, kind in _TASK_HEADS.items():
        if any(base.__name__.endswith(head) for base in type(model).__mro__):
            return kind
    if getattr(model.config, "is_encoder_decoder", False) and model.can_generate():
        return "seq2seq"
    if any(kind.__name__.endswith("ForMaskedLM") for kind in type(model).__mro__):
        return "masked"
    if model.can_generate():
        return "causal"
    raise UsageError(
        f"{type(model).__name__} has no language-model head: load it with AutoModelForCausalLM, AutoModelForMaskedLM "
        "or AutoModelForSeq2SeqLM, or for a task with mnemic.with_head"
    )


def refuse_task(corpus: Any, model: Any) -> None:
    """UsageError if a model without a head for it is given a task."""
    if isinstance(corpus, Task):
        raise UsageError(
            f"{corpus.name} is a task, and {type(model).__name__} a language model without a head for it: give a "
            "pretrained encoder one with mnemic.with_head(encoder, task), or train it with `mnemic train`"
        )


def check_length(model: Any, length: int, option: str) -> None:
    """UsageError if a model has fewer positions than `length`, the value of `option`."""
    if (most := positions(model)) is not None and length > most:
        raise UsageError(
            f"{option} = {length}, but {type(model).__name__} has {most} positions: set it to {most} or less"
        )


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """UsageError if a tokenizer has tokens that a model has no embedding for."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None) or model.config.vocab_size
    if len(tokenizer) > size:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens and {type(model).__name__} only {size}: use the tokenizer the "
            "model was made for, or model.resize_token_embeddings(len(tokenizer))"
        )
