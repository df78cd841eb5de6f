"""Several processes that train together: what one would do, resumed in any number, and no one left waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count as counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mnemic.train.checkpoints import checkpoint_steps, load_newest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TRANSFORMERS_VERBOSITY": "error"}


class Group:
    """The process that forks groups."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.train.group_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def train(
        self,
        count: int,
        kind: str = "decoder",
        out: Path | None = None,
        model: dict[str, Any] | None = None,
        fault: tuple[str, int, int] | None = None,
        **config: Any,
    ) -> list[dict[str, Any]]:
        """Trains in `count` processes; of each its result, or that it was killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        out = out or self.folder / str(next(self.numbers))
        order = {"kind": kind, "out": str(out), "model": model or {}, "config": config, "fault": fault}
        self.process.stdin.write(json.dumps({"count": count, **order}) + "\n")
        self.process.stdin.flush()
        statuses = json.loads(self.process.stdout.readline())
        assert set(statuses) <= {0, -signal.SIGKILL}  # none hung, none failed in another way
        results = [
            json.loads(Path(f"{out}.{rank}.json").read_text()) if status == 0 else {"error": "killed"}
            for rank, status in enumerate(statuses)
        ]
        return [{"out": out, **result} for result in results]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("group"))
    with made.process:  # closes its stdin at the end, on which it ends too
        yield made
    assert made.process.returncode == 0


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def check_same_run(one: Path, other: Path) -> None:
    """The same losses, evaluations, norms and weights, but for the order of sums."""
    ours, theirs = (
        # how a memory is used is told by the main process, of its own rows
        [{key: value for key, value in line.items() if "top1" not in key} for line in lines(out)]
        for out in (one, other)
    )
    assert [sorted(line) for line in ours] == [sorted(line) for line in theirs]
    for here, there in zip(ours, theirs, strict=True):
        assert here.pop("evaluation", {}) == pytest.approx(there.pop("evaluation", {}), rel=1e-9)
        assert here == pytest.approx(there, rel=1e-9)
    for name in ("model", "best"):
        left, right = (load_file(out / name / "model.safetensors") for out in (one, other))
        assert left.keys() == right.keys()
        for key in left:
            torch.testing.assert_close(left[key], right[key], rtol=1e-6, atol=1e-9)


CASES = {
    "decoder": ("decoder", {}, {}),
    "accumulating": ("decoder", {}, {"batch_size": 8, "accumulate": 2}),
    "adaptive": ("decoder", {"adaptive_cutoffs": [99, 120]}, {"batch_size": 4, "segment_length": 3}),
    "gpt2": ("gpt2", {}, {}),
    "masked": ("bert", {}, {"optimizer": "adafactor", "schedule": "rsqrt"}),
    "product keys": ("gpt2", {"product_keys": {"gated": True}}, {"batch_size": 8, "accumulate": 2}),
    "masked product keys": ("bert", {"product_keys": {"query_norm": "layer"}}, {"trainable": "memory"}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_do_what_one_does(group: Group, case: str) -> None:
    kind, model, config = CASES[case]
    (one,) = group.train(1, kind, model=model, **config)
    two = group.train(2, kind, model=model, **config)
    check_same_run(one["out"], two[0]["out"])
    assert [result["losses"] for result in two] == [two[0]["losses"]] * 2
    assert two[0]["report"] == two[1]["report"]
    assert (one["report"]["processes"], two[0]["report"]["processes"]) == (1, 2)
    assert len({loss for _, loss in one["losses"]}) == 8  # there is something to compare


def test_accelerate_launches_two_processes(group: Group, tmp_path: Path) -> None:
    order = {"kind": "decoder", "out": str(tmp_path / "run"), "model": {}, "config": {}, "fault": None}
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"]
    command = [sys.executable, "-m", *launch, "-m", "tests.unit.train.group_process", json.dumps(order)]
    launched = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert launched.returncode == 0, launched.stderr
    results = [json.loads((tmp_path / f"run.{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0]["report"] == results[1]["report"]
    check_same_run(group.train(2)[0]["out"], tmp_path / "run")


def test_only_the_main_process_writes(group: Group) -> None:
    main, other = group.train(2)
    assert main["written"]
    assert other["written"] == []


def test_processes_begin_with_the_weights_of_the_main_one(group: Group) -> None:
    same, different = group.train(2), group.train(2, fault=("other weights", 1, 0))
    assert different[0]["losses"] == same[0]["losses"]


def test_a_weight_that_one_process_uses_is_trained_in_all_and_one_that_none_uses_in_none(group: Group) -> None:
    results = group.train(2, "gpt2", fault=("partly used", -1, 0), weight_decay=0.5, evaluate_every=0)
    weights = load_file(results[0]["out"] / "checkpoints" / "step-00000008" / "model.safetensors")
    assert (weights["idle"] == 1).all()  # not decayed either
    assert (weights["bias"] != 0).any()


def test_killed_and_resumed_is_never_stopped(group: Group) -> None:
    """Bit for bit, with dropout: each process goes on with its own random numbers and the caches of its own rows."""
    model, config = {"dropout": 0.2}, {"batch_size": 8, "accumulate": 2}
    straight = group.train(2, model=model, **config)[0]
    random = load_file(straight["out"] / "checkpoints" / "step-00000008" / "random.safetensors")
    assert not torch.equal(random["0/torch"], random["1/torch"])  # the rows of different ranks differ in their dropout
    for rank in (0, 1):
        killed = group.train(2, model=model, fault=("kill", rank, 6), **config)
        assert killed[rank]["error"] == "killed"
        assert "because another one is gone" in killed[1 - rank]["message"]
        resumed = group.train(2, out=killed[0]["out"], model=model, resume=True, **config)[0]
        assert resumed["losses"] == straight["losses"]
        names = ["log.jsonl", "model/model.safetensors", "best/model.safetensors"]
        names += [f"checkpoints/step-00000008/{p}.safetensors" for p in ("model", "optimizer", "carry", "random")]
        for name in names:
            assert (resumed["out"] / name).read_bytes() == (straight["out"] / name).read_bytes()


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 4)])
def test_resumed_by_another_number_of_processes(group: Group, first: int, then: int) -> None:
    (straight,) = group.train(1)
    stopped = group.train(first, fault=("interrupt", 0, 5))
    assert stopped[0]["error"] == "KeyboardInterrupt"
    resumed = group.train(then, out=stopped[0]["out"], resume=True)
    check_same_run(straight["out"], resumed[0]["out"])


def test_a_finished_run_is_finished_for_all(group: Group) -> None:
    first = group.train(2)
    again = group.train(2, out=first[0]["out"], resume=True)
    assert [result["report"] for result in again] == [first[0]["report"]] * 2
    refused = group.train(2, out=first[0]["out"])
    assert "already holds a run" in refused[0]["message"]
    assert "because process 0 failed" in refused[1]["message"]


def test_a_loss_that_is_no_number_in_one_process_stops_all(group: Group) -> None:
    results = group.train(2, "gpt2", fault=("nan", 1, 5))
    for result in results:
        assert result["error"] == "MnemicError"
        assert "broke down at step 5" in result["message"]
        assert "the checkpoint of step 3" in result["message"]
    checkpoint = load_newest(results[0]["out"] / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert json.loads((results[0]["out"] / "report.json").read_text())["status"] == "broken down"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_in_one_process_ends_all(group: Group, rank: int) -> None:
    results = group.train(3, batch_size=6, fault=("error", rank, 4))
    for place, result in enumerate(results):
        assert result["message"].endswith("the cat bit through the cable" * 500)  # a message longer than a note
        assert result["error"] == ("ValueError" if place == rank else "FailedElsewhere")


def test_a_checkpoint_that_cannot_be_written_ends_all(group: Group) -> None:
    main, other = group.train(2, fault=("disk", 0, 0))
    assert main["message"] == "the disk is full"
    assert other["message"] == "training stopped in process 1, because process 0 failed: the disk is full"


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_in_one_process_stops_all_after_the_same_step(group: Group, rank: int) -> None:
    results = group.train(2, fault=("interrupt", rank, 5))
    for result in results:
        assert result["error"] == "KeyboardInterrupt"
        assert "stopped at step 5 of 8" in result["message"]
    assert checkpoint_steps(results[0]["out"] / "checkpoints") == [5, 3, 0]


def test_a_table_that_one_process_reads_is_trained_in_all(group: Group) -> None:
    results = group.train(2, "gpt2", fault=("table of one", -1, 0), evaluate_every=0)
    steps = [results[0]["out"] / "checkpoints" / f"step-0000000{step}" / "model.safetensors" for step in (0, 8)]
    before, after = (load_file(step)["table.weight"] for step in steps)
    assert 0 < (before != after).sum() < len(before)
    assert results[0]["losses"] == results[1]["losses"]


def test_queries_that_are_normalised_over_a_batch_are_not_divided(group: Group) -> None:
    for result in group.train(2, "bert", model={"product_keys": {"query_norm": "batch"}}):
        assert result["error"] == "UsageError"
        assert "layers.0.norm normalises over the whole batch" in result["message"]
        assert "query_norm = 'layer'" in result["message"]


@pytest.mark.parametrize(
    ("count", "config", "fault", "message"),
    [
        (2, {"batch_size": 5}, None, "batch_size = 5 cannot be divided among 2 processes"),
        (2, {"batch_size": 6, "accumulate": 2}, None, "accumulate = 2 and consecutive = 1: set it to a multiple of 4"),
        (2, {"batch_size": 8, "accumulate": 2, "batching": "consecutive", "consecutive": 4}, None, "a multiple of 16"),
        (2, {}, ("larger", 1, 0), "the processes have different models"),
        (2, {}, ("batch norm", -1, 0), "norm normalises over the whole batch"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    group: Group, count: int, config: dict[str, Any], fault: Any, message: str
) -> None:
    for result in group.train(count, "gpt2", fault=fault, **config):
        assert result["error"] == "UsageError"
        assert message in result["message"]
