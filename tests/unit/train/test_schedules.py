"""Schedules against the papers' formulas, written out naively."""

from __future__ import annotations

import math

import pytest

from mnemic.train.config import SCHEDULES, TrainConfig
from mnemic.train.schedules import learning_rate


def rates(**options: object) -> list[float]:
    config = TrainConfig(**options)
    return [learning_rate(step, config) for step in range(1, config.steps + 1)]


def test_inverse_sqrt_is_the_transformers() -> None:
    """arXiv:1706.03762, equation 3: d^-0.5 * min(step^-0.5, step * warmup^-1.5)."""
    width, warmup = 512, 40
    paper = [width**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, 201)]
    ours = rates(schedule="inverse-sqrt", steps=200, warmup=warmup, learning_rate=(width * warmup) ** -0.5)
    assert ours == pytest.approx(paper, rel=1e-12)


def test_inverse_sqrt_peaks_at_the_learning_rate() -> None:
    ours = rates(schedule="inverse-sqrt", steps=100, warmup=10, learning_rate=5e-4)
    assert max(ours) == ours[9] == pytest.approx(5e-4)


def test_rsqrt_is_memorizing_transformers() -> None:
    """arXiv:2203.08913, section 4: linear warm-up over 1000 steps, then square root decay, with rate 1.0."""
    ours = rates(schedule="rsqrt", steps=3000, warmup=1000, learning_rate=1.0)
    for step, rate in enumerate(ours, start=1):
        expected = step / 1000 / math.sqrt(1000) if step < 1000 else 1 / math.sqrt(step)
        assert rate == pytest.approx(expected, rel=1e-12)


def test_linear_and_cosine_fall_to_zero_just_after_the_end() -> None:
    steps, warmup = 50, 10
    for step, (line, wave) in enumerate(
        zip(
            rates(schedule="linear", steps=steps, warmup=warmup, learning_rate=2.0),
            rates(schedule="cosine", steps=steps, warmup=warmup, learning_rate=2.0),
            strict=True,
        ),
        start=1,
    ):
        if step <= warmup:
            assert line == wave == pytest.approx(2.0 * step / warmup)
        else:
            gone = (step - warmup) / (steps + 1 - warmup)
            assert line == pytest.approx(2.0 * (1 - gone))
            assert wave == pytest.approx(2.0 * (1 + math.cos(math.pi * gone)) / 2)
    assert line > 0
    assert wave > 0


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("warmup", [0, 1, 7, 30, 100])
def test_all_are_positive_and_never_above_the_peak(name: str, warmup: int) -> None:
    ours = rates(schedule=name, steps=30, warmup=warmup, learning_rate=0.5)
    assert all(0 < rate <= 0.5 for rate in ours)
    rising = ours[:warmup]
    assert rising == sorted(rising)
