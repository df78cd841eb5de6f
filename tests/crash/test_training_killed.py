"""Training killed with SIGKILL and resumed, again and again: the same losses and weights as never stopped."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mnemic.files import TEMPORARY

from .killing import Forks
from .training_process import STEPS

KINDS = ("decoder", "gpt2", "bert")


Trainings = Forks[dict[str, bytes]]


def outcome(out: Path) -> dict[str, bytes]:
    """All that training decides: the log, the weights, the optimiser, the carry and the generators, byte for byte."""
    names = ["log.jsonl", "model/model.safetensors", "best/model.safetensors"]
    names += [f"checkpoints/step-{STEPS:08d}/{part}.safetensors" for part in ("model", "optimizer", "carry", "random")]
    return {name: (out / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    made = Trainings("training_process", tmp_path_factory.mktemp("killed"), outcome)
    with made.process:  # closes its stdin at the end, on which it ends too
        yield made
    assert made.process.returncode == 0


def check(trainings: Trainings, kind: str, out: Path) -> None:
    expected, got = trainings.never_stopped(kind), outcome(out)
    assert [name for name in expected if expected[name] != got[name]] == []
    assert json.loads((out / "report.json").read_text())["status"] == "finished"
    assert not [item for item in out.rglob(TEMPORARY + "*") if item.parent != out]


def test_the_runs_that_are_compared_are_worth_comparing(trainings: Trainings) -> None:
    for kind in KINDS:
        lines = [json.loads(line) for line in trainings.never_stopped(kind)["log.jsonl"].splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(2, STEPS + 1, 2))
        assert len({line["loss"] for line in lines if "loss" in line}) == STEPS // 2
        assert [line["step"] for line in lines if "evaluation" in line] == [4, 8, 12]
    assert len(trainings.never_stopped("decoder")[f"checkpoints/step-{STEPS:08d}/carry.safetensors"]) > 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_file_operations(trainings: Trainings, tmp_path: Path, kind: str, seed: int) -> None:
    draw, killed = random.Random(f"{kind}{seed}"), 0
    while (status := trainings.work(kind, tmp_path / "run", die_at=draw.randrange(60, 260))) != 0:
        assert status == -signal.SIGKILL
        killed += 1
        assert killed < 50
    assert killed >= 2
    check(trainings, kind, tmp_path / "run")


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_from_outside_at_random_moments(trainings: Trainings, tmp_path: Path, seed: int) -> None:
    draw, status, kind = random.Random(seed), None, "decoder"
    for _ in range(8):
        status = trainings.work(kind, tmp_path / "run", kill_after=draw.uniform(0.02, 0.6))
        assert status in (0, -signal.SIGKILL)
    assert trainings.work(kind, tmp_path / "run") == 0
    check(trainings, kind, tmp_path / "run")
