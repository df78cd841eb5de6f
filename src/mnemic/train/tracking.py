"""Accelerate's part of a run: the device, back-propagation, clipping, and trackers (TensorBoard, Weights & Biases)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from accelerate import Accelerator

from mnemic.errors import UsageError
from mnemic.train.config import TrainConfig
from mnemic.train.state import random_state, set_random_state


def make_accelerator(config: TrainConfig) -> Accelerator:
    """An Accelerator with the configured trackers, which must be installed."""
    for tracker in config.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise UsageError(f"tracker {tracker!r} is not installed: pip install 'mnemic[track]'")
    accelerator = Accelerator(log_with=list(config.trackers) or None, project_dir=Path(config.out))
    kind = accelerator.distributed_type.value
    if not kind.startswith(("NO", "MULTI_")) or accelerator.scaler is not None:
        raise UsageError(
            f"accelerate is set up for {kind} and precision {accelerator.mixed_precision!r}: mnemic trains with a "
            "whole model in each process, in float32 or bf16 by its own option"
        )
    return accelerator


def start_trackers(accelerator: Accelerator, config: TrainConfig, step: int) -> None:
    """Opens the trackers in `out/tracking`; what they hold of steps after `step`, from a killed process, is hidden."""
    if not config.trackers:
        return
    values = {
        name: value if isinstance(value, int | float | str) else str(value) for name, value in config.to_dict().items()
    }
    before = random_state()  # trackers draw names for themselves; the run's dropout must not notice
    accelerator.init_trackers(
        "tracking", values, {"tensorboard": {"purge_step": step + 1}, "wandb": {"dir": config.out}}
    )
    set_random_state(*before)


def end_trackers(accelerator: Accelerator) -> None:
    """Closes the trackers; accelerate's own end of training would also part the processes for good."""
    for tracker in accelerator.trackers:
        tracker.finish()
