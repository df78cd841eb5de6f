"""The settings of a training run, and the names that they may take; importing it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mnemic.config import Config, option
from mnemic.errors import UsageError, unknown_name
from mnemic.registry import Registry

OBJECTIVES = Registry(
    "objective",
    {
        "next-token": "mnemic.train.objectives:NextToken",
        "masked": "mnemic.train.objectives:Masked",
        "seq2seq": "mnemic.train.seq2seq:Seq2Seq",
        "classification": "mnemic.train.tasks:Classification",
        "spans": "mnemic.train.tasks:Spans",
    },
)
SCHEDULES = Registry(
    "schedule",
    {
        "constant": "mnemic.train.schedules:constant",
        "linear": "mnemic.train.schedules:linear",
        "cosine": "mnemic.train.schedules:cosine",
        "inverse-sqrt": "mnemic.train.schedules:inverse_sqrt",
        "rsqrt": "mnemic.train.schedules:rsqrt",
    },
)
OPTIMIZERS = Registry(
    "optimizer", {"adamw": "mnemic.train.optimizers:adamw", "adafactor": "mnemic.train.optimizers:adafactor"}
)
TRACKERS = ("tensorboard", "wandb")
PLANS_AHEAD = ("linear", "cosine")  # schedules that depend on the number of steps


@dataclass(kw_only=True)
class TrainConfig(Config):
    """How to train: data, optimisation, and what is written where."""

    steps: int = option(1000, "how many times the weights are updated")
    batch_size: int = option(8, "rows in a batch, of all processes; each row reads its own documents, a segment a step")
    segment_length: int = option(
        128,
        "tokens in a row of a batch; translating, a batch has as many rows as make batch_size x segment_length tokens; "
        "in a task, to how many an example is cut",
    )
    segments: int = option(
        1,
        "consecutive segments that each row reads in a step; the gradient goes back through what a recurrent memory "
        "carries from one to the next, and no further (truncated back-propagation through time)",
    )
    stride: int = option(128, "tokens by which windows move on over a text with the answer to a question; spans only")
    batching: Literal["documents", "consecutive", "similar", "shuffled"] = option(
        "documents",
        "rows of a batch: documents, read on from batch to batch; consecutive segments of a text; segments with many "
        "words in common (similar, by BM25); or shuffled segments; pairs: documents, by length, or similar targets",
    )
    consecutive: int = option(
        1, "how many rows of a batch are consecutive segments of one text, if batching = consecutive"
    )
    learning_rate: float = option(3e-4, "the schedule's learning rate: its peak, or for rsqrt its factor")
    values_rate: float = option(
        10.0, "learning rate of tables of values (product keys), as a multiple of that of everything else"
    )
    warmup: int = option(100, "steps in which the learning rate rises linearly from zero")
    schedule: str = option("cosine", "learning rate after the warm-up: constant, linear, cosine, inverse-sqrt, rsqrt")
    optimizer: str = option("adamw", "adamw or adafactor")
    weight_decay: float = option(0.01, "decay of matrices; biases, norms and other vectors have none")
    betas: list[float] = option([0.9, 0.999], "AdamW's averaging of gradients and of their squares")
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    accumulate: int = option(1, "pieces a batch is cut into to save memory; the gradient stays that of the whole batch")
    precision: Literal["float32", "bf16"] = option("float32", "arithmetic of the forward pass; weights keep their own")
    seed: int = option(0, "of the order of documents, dropout and masking")
    out: str = option("runs/train", "the run's folder: checkpoints, log, report and the trained model")
    checkpoint_every: int = option(500, "steps between checkpoints; there is always one at the start and at the end")
    keep: int = option(2, "how many checkpoints to keep")
    log_every: int = option(10, "steps between lines of log.jsonl; a line has the mean loss since the one before")
    evaluate_every: int = option(0, "steps between losses on the valid split; the best model goes to best/; 0 is never")
    trackers: list[str] = option([], "where else to log: tensorboard, wandb")
    objective: str = option(
        "auto", "next-token, masked, seq2seq, classification, spans, or auto: what the model was made for"
    )
    label_smoothing: float = option(0.0, "share of a target's probability that is spread over all tokens; seq2seq only")
    split: str = option("train", "the part of the corpus to train on")
    trainable: Literal["all", "memory", "base", "slots"] = option(
        "all",
        "memory freezes the base model and trains its memories only; base freezes the memories; slots freezes all but "
        "the slots of product keys that were chosen with learn_only",
    )
    resume: bool = option(False, "continue the run in `out` from its newest checkpoint, if there is one")

    def check(self) -> None:
        """Raises UsageError for a value out of range or a name that does not exist."""
        for name in (
            "steps",
            "batch_size",
            "segment_length",
            "segments",
            "stride",
            "accumulate",
            "checkpoint_every",
            "keep",
            "log_every",
            "consecutive",
        ):
            self._at_least(name, 1)
        for name in ("learning_rate", "values_rate", "warmup", "weight_decay", "clip", "evaluate_every", "seed"):
            self._at_least(name, 0)
        if self.consecutive > 1 and self.batching != "consecutive":
            raise UsageError(f"TrainConfig.consecutive = {self.consecutive} needs batching = 'consecutive'")
        if self.batching == "consecutive" and self.batch_size // self.accumulate % self.consecutive:
            raise UsageError(
                f"TrainConfig.consecutive = {self.consecutive} does not divide the "
                f"{self.batch_size // self.accumulate} rows that are read at once"
            )
        if self.segments > 1 and self.batching != "documents":
            raise UsageError(f"TrainConfig.segments = {self.segments} needs batching = 'documents'")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"TrainConfig.label_smoothing = {self.label_smoothing}: expected 0 or more, below 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"TrainConfig.betas = {self.betas}: expected two numbers from 0 to below 1")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"TrainConfig.accumulate = {self.accumulate} does not divide batch_size = {self.batch_size}: "
                "a batch is cut into pieces of equally many rows"
            )
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", self.schedule, SCHEDULES)
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.objective not in (known := ("auto", *OBJECTIVES)):
            raise unknown_name("objective", self.objective, known)
        for tracker in self.trackers:
            if tracker not in TRACKERS:
                raise unknown_name("tracker", tracker, TRACKERS)

    def _at_least(self, name: str, least: int) -> None:
        if not getattr(self, name) >= least:  # also refuses nan
            raise UsageError(f"TrainConfig.{name} = {getattr(self, name)}: expected {least} or more")

    def differences(self, started: TrainConfig) -> dict[str, tuple[object, object]]:
        """The options that may not differ from those the run was started with but do: name -> (then, now).

        Where results go and how often may change; so may `steps` if the schedule does not look ahead.
        """
        free = {"out", "resume", "checkpoint_every", "keep", "log_every", "evaluate_every", "trackers"}
        if self.schedule not in PLANS_AHEAD:
            free.add("steps")
        return {
            name: (getattr(started, name), getattr(self, name))
            for name in self.types()
            if name not in free and getattr(started, name) != getattr(self, name)
        }
