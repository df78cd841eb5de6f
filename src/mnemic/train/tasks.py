"""Tasks: the label or the score of a text, and which words of a text answer a question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemic.data.examples import ExampleBatches, TokenizedExamples, tokenize_task
from mnemic.data.tasks import Task, check_task
from mnemic.errors import UsageError
from mnemic.hf.losses import IGNORED
from mnemic.train.config import TrainConfig
from mnemic.train.objectives import Batch, Objective


class TaskObjective(Objective):
    """What the two kinds of tasks have in common: rows that stand alone, padded on the right."""

    stream = ExampleBatches

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        super().__init__(model, tokenizer, seed)
        self.keeps_documents_apart = True  # a row is one example
        self.padding: Any = getattr(model.config, "pad_token_id", None)
        if self.padding is None:
            raise UsageError(
                f"{type(model).__name__} does not say which token is padding: set model.config.pad_token_id, "
                "as to tokenizer.pad_token_id or tokenizer.eos_token_id"
            )

    def check(self, task: Any) -> Task:
        """The task; UsageError if it does not suit the model."""
        return check_task(task, self.kind, type(self.model).__name__)

    def tokenize(self, corpus: Any, split: str, folder: Path, config: TrainConfig) -> TokenizedExamples:
        """The rows of a split, written to a folder."""
        task = self.check(corpus)
        return tokenize_task(task, split, self.tokenizer, config.segment_length, config.stride, folder)

    def open_tokens(self, folder: Path) -> TokenizedExamples:
        """What `tokenize` wrote to a folder."""
        return TokenizedExamples.open(folder)

    def check_batching(self, batching: str) -> None:
        """UsageError: examples are always shuffled."""
        raise UsageError(f"batching = {batching!r} is of texts: the examples of a task are shuffled with 'documents'")

    def prepare(self, batch: Batch, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Writes the model's own padding, by which some models know it, where the mask says so."""
        return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, self.padding)}

    def inputs(self, batch: Batch, carry: Any = None) -> dict[str, Any]:
        """Those tensors of the batch that the model's forward takes; a mask that masks nothing is left out."""
        names = ["input_ids"]
        if not batch["attention_mask"].all():
            names.append("attention_mask")
        if "token_type_ids" in batch and getattr(self.model.config, "type_vocab_size", 2) > 1:
            names.append("token_type_ids")
        return {name: batch[name] for name in names if name in self.accepts}

    def outputs(self, batch: Batch) -> Any:
        """What the model says of a prepared batch."""
        return self.model(**self.inputs(batch))


class Classification(TaskObjective):
    """Name the label of a text or of a pair of texts, or give its score."""

    kind = "classification"

    def check(self, task: Any) -> Task:
        """The task; UsageError if the model has another number of labels."""
        task = super().check(task)
        if (count := self.model.config.num_labels) != (expected := len(task.labels) or 1):
            what = f"{expected} labels" if task.labels else "a score, which is one output"
            raise UsageError(
                f"{task.name} has {what}, and {type(self.model).__name__} has {count}: "
                f"load it with mnemic.with_head or num_labels={expected}"
            )
        return task

    def losses(self, batch: Batch, carry: Any) -> Tensor:
        """The negative log likelihood of the labels, or the squared error of the scores, (B,)."""
        logits, targets = self.outputs(batch).logits, batch["targets"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not targets.is_floating_point():
            return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        errors = (logits[:, 0] - targets.to(logits.dtype)).square()
        return errors.masked_fill(targets == IGNORED, 0)


class Spans(TaskObjective):
    """Find the first and the last token of the words that answer a question."""

    kind = "spans"

    def losses(self, batch: Batch, carry: Any) -> Tensor:
        """The negative log likelihood of the first and of the last token, (B, 2)."""
        outputs, targets = self.outputs(batch), batch["targets"]
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)  # (B, T, 2), as cross_entropy wants it
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits.masked_fill((batch["attention_mask"] == 0)[..., None], -torch.inf)
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
