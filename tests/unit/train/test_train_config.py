"""TrainConfig: ranges, names, and what may change when a run is resumed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mnemic.errors import UsageError
from mnemic.train.config import OBJECTIVES, OPTIMIZERS, SCHEDULES, TrainConfig


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("schedule", "cosin", "did you mean 'cosine'"),
        ("optimizer", "adam", "did you mean 'adamw'"),
        ("objective", "next-tokn", "did you mean 'next-token'"),
        ("trackers", ["tensorbord"], "did you mean 'tensorboard'"),
        ("steps", 0, "steps = 0: expected 1 or more"),
        ("learning_rate", float("nan"), "learning_rate = nan"),
        ("learning_rate", -1.0, "learning_rate = -1.0"),
        ("betas", [0.9], "two numbers"),
        ("betas", [0.9, 1.0], "two numbers"),
        ("accumulate", 3, "does not divide batch_size"),
        ("precision", "fp16", "one of 'float32', 'bf16'"),
        ("steps", "many", "expected a whole number"),
    ],
)
def test_a_bad_value_is_named(option: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**{option: value})


def test_every_option_has_help_and_every_name_can_be_loaded() -> None:
    assert all(TrainConfig.help().values())
    for registry in (OBJECTIVES, SCHEDULES, OPTIMIZERS):
        assert all(callable(registry.load(name)) for name in registry)


def test_json_and_toml_round_trip(tmp_path) -> None:
    config = TrainConfig(steps=7, trackers=["tensorboard"], out="a b", schedule="rsqrt")
    for name in ("c.json", "c.toml"):
        config.save(tmp_path / name)
        assert TrainConfig.load(tmp_path / name) == config


def test_what_may_change_on_resume() -> None:
    started = TrainConfig(schedule="cosine")
    free = TrainConfig(
        schedule="cosine",
        out="x",
        resume=True,
        keep=9,
        log_every=3,
        evaluate_every=5,
        checkpoint_every=7,
        trackers=["wandb"],
    )
    assert free.differences(started) == {}
    assert TrainConfig(schedule="cosine", seed=3, clip=2.0).differences(started) == {
        "clip": (1.0, 2.0),
        "seed": (0, 3),
    }


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_steps_may_change_only_if_the_schedule_does_not_look_ahead(schedule: str) -> None:
    fewer, more = TrainConfig(schedule=schedule, steps=50, warmup=5), TrainConfig(schedule=schedule, steps=90, warmup=5)
    shape = SCHEDULES.load(schedule)
    looks_ahead = any(shape(step, 5, 50) != shape(step, 5, 90) for step in range(1, 51))
    assert ("steps" in more.differences(fewer)) == looks_ahead


def test_the_config_and_the_packages_need_no_torch() -> None:
    code = (
        "import sys, mnemic, mnemic.train, mnemic.train.config, mnemic.evaluate.config; "
        "mnemic.TrainConfig(); mnemic.EvaluateConfig(); mnemic.train.TrainConfig(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "first",
    ["", "import mnemic.train.config", "import mnemic.train.loop", "import mnemic.evaluate.config", "mnemic.train"],
)
def test_train_and_evaluate_are_functions_and_packages_in_any_order(first: str) -> None:
    code = f"""
import mnemic
{first}
for verb in ("train", "evaluate"):
    for _ in range(2):
        try:
            getattr(mnemic, verb)(None, None, "no-such-corpus", nonsense=1)
        except mnemic.UsageError as error:
            assert "nonsense" in str(error), error
import mnemic.train.config, mnemic.evaluate.config
assert mnemic.train.config.TrainConfig is mnemic.TrainConfig is mnemic.train.TrainConfig
assert mnemic.evaluate.config.EvaluateConfig is mnemic.EvaluateConfig
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
