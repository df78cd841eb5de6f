"""EvaluateConfig: ranges and names."""

from __future__ import annotations

import pytest

from mnemic.errors import UsageError
from mnemic.evaluate.config import METRICS, EvaluateConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["perplexitie"]}, "did you mean 'perplexity'"),
        ({"metrics": []}, "metrics is empty"),
        ({"window": 0}, "window = 0: expected 1 or more"),
        ({"stride": 0}, "stride = 0: expected 1 or more"),
        ({"window": 4, "stride": 5}, "tokens would be left out"),
        ({"max_tokens": -1}, "max_tokens = -1"),
    ],
)
def test_a_bad_value_is_named(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvaluateConfig(**options)


def test_every_option_has_help_and_every_metric_can_be_loaded() -> None:
    assert all(EvaluateConfig.help().values())
    assert all(callable(METRICS.load(name)) for name in METRICS)
