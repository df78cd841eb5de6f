"""The settings with which tasks are learned: Large Product Key Memory (arXiv:2010.03881), Table 3."""

from __future__ import annotations

import math
from typing import Any

from mnemic.data.tasks import Task
from mnemic.errors import UsageError
from mnemic.train.config import TrainConfig

BATCH, WARMUP = 32, 0.06  # rows, and the share of the steps in which the learning rate rises
TABLE_3: dict[str, dict[str, Any]] = {
    "classification": {"learning_rate": 2e-5, "weight_decay": 0.1, "segment_length": 128},
    "spans": {"learning_rate": 5e-5, "weight_decay": 0.01, "segment_length": 384, "stride": 128},
}
EPOCHS = {"classification": 10, "spans": 3}


def fine_tuning(task: Task, epochs: float | None = None, **options: Any) -> TrainConfig:
    """The settings of Table 3 for a task, GLUE's for one of your own; options by name are those of TrainConfig.

    The steps follow from the number of examples, the epochs and the batch size.

    >>> mnemic.train(model, tokenizer, task, mnemic.fine_tuning(task, out="runs/cola", seed=1))
    """
    if not isinstance(task, Task):
        raise UsageError(f"fine_tuning() takes a task, as from mnemic.open_task, not {type(task).__name__}")
    epochs = EPOCHS[task.kind] if epochs is None else epochs
    if not epochs > 0:
        raise UsageError(f"epochs = {epochs}: expected more than 0")
    settings = {"schedule": "linear", "batch_size": BATCH, **TABLE_3[task.kind], **options}
    if "steps" not in settings:
        count = sum(1 for _ in task.examples(settings.get("split", "train")))
        settings["steps"] = max(1, round(epochs * math.ceil(count / max(settings["batch_size"], 1))))
    settings.setdefault("warmup", math.ceil(WARMUP * settings["steps"]))
    return TrainConfig.from_dict(settings)
