"""Learning rates by step, as in the papers; steps count from 1.

Each rises linearly over `warmup` steps, so that step s of the warm-up has s / warmup of what follows it.
"""

from __future__ import annotations

import math

from mnemic.train.config import SCHEDULES, TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate with which step `step` (from 1) is made."""
    return config.learning_rate * SCHEDULES.load(config.schedule)(step, config.warmup, config.steps)


def constant(step: int, warmup: int, steps: int) -> float:
    """1 after the warm-up."""
    return _rise(step, warmup)


def linear(step: int, warmup: int, steps: int) -> float:
    """Falls in a straight line from 1 at the end of the warm-up to 0 just after the last step."""
    return _rise(step, warmup) * (1 - _progress(step, warmup, steps))


def cosine(step: int, warmup: int, steps: int) -> float:
    """Falls along half a cosine from 1 at the end of the warm-up to 0 just after the last step."""
    return _rise(step, warmup) * 0.5 * (1 + math.cos(math.pi * _progress(step, warmup, steps)))


def inverse_sqrt(step: int, warmup: int, steps: int) -> float:
    """Falls as sqrt(warmup / step) from 1: the shape of the Transformer (arXiv:1706.03762, eq. 3), fairseq's scale.

    The Transformer's own rate, d^-0.5 min(s^-0.5, s warmup^-1.5), is this with learning_rate = (d * warmup)^-0.5.
    """
    return _rise(step, warmup) * math.sqrt(max(warmup, 1) / max(step, warmup, 1))


def rsqrt(step: int, warmup: int, steps: int) -> float:
    """1 / sqrt(max(step, warmup)): the factor of Memorizing Transformers' Adafactor (arXiv:2203.08913), rate 1.0."""
    return _rise(step, warmup) / math.sqrt(max(step, warmup, 1))


def _rise(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def _progress(step: int, warmup: int, steps: int) -> float:
    """How much of the way from the end of the warm-up to just after the last step is behind us."""
    return min(1.0, max(0, step - warmup) / max(1, steps + 1 - warmup))
