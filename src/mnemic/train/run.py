"""A run as it lies in its folder, and how far it has come.

out/
    checkpoints/  log.jsonl  report.json  lock
    model/        the last model, with its tokenizer, when the run is finished
    best/         the model with the lowest loss on the valid split, if that is measured
    tokens/       the corpus as token ids
    tracking/     TensorBoard's or W&B's files, if asked for
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnemic.errors import UsageError
from mnemic.train.checkpoints import checkpoint_steps


@dataclass
class Progress:
    """How far a run has come; plain values, a part of each checkpoint."""

    step: int = 0
    tokens: int = 0  # targets trained on
    seconds: float = 0.0  # spent in steps, over all the processes that took part
    loss_sum: float = 0.0  # since the last line of the log
    loss_count: int = 0
    best: float | None = None  # the lowest loss on the valid split


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its report."""

    out: Path
    report: dict[str, Any]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, mean loss since the line before) of each line of the log."""
        return [(entry["step"], entry["loss"]) for entry in self.report["losses"]]


def refuse_to_overwrite(out: Path, resume: bool) -> None:
    """UsageError if writing a run into `out` would destroy what is there."""
    steps = checkpoint_steps(out / "checkpoints")
    if steps and not resume:
        raise UsageError(
            f"{out} already holds a run (newest checkpoint: step {steps[0]}): go on with resume = true "
            "(--resume), or choose another out folder"
        )
    for name in ("model", "best"):
        if not steps and (out / name).exists():
            raise UsageError(f"{out / name} would be replaced, and is not of a run: choose another out folder")


def finished_report(out: Path, steps: int) -> dict[str, Any] | None:
    """The report of the run in `out` if it is finished with `steps` steps, or None."""
    try:
        report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    done = report.get("status") == "finished" and report.get("step") == steps and (out / "model").is_dir()
    return report if done else None
