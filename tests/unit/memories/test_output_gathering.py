"""The in-batch memory of several processes: losses and gradients are those of one process with all rows.

Run as a program this file forks groups of processes, as tests/unit/train/group_process.py does, whose models have an
output memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count as counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.hf.losses import IGNORED, token_losses
from mnemic.memories.output.gathering import Among, whole_batch
from mnemic.memories.output.layer import NOTHING, Own
from mnemic.memories.output.testing import Piece
from mnemic.train.processes import Processes
from tests.contract.architectures import build
from tests.unit.train import group_process
from tests.unit.train.test_processes import ENVIRONMENT, ROOT, Group, check_same_run

WIDEST = 7  # tokens of the longest row


# In the processes


def with_memory(kind: str, options: dict[str, Any], vocabulary: int) -> Any:
    memory = mnemic.OutputMemory(**options.pop("memory"))
    return mnemic.augment(_plain_model(kind, options, vocabulary), memory)


def sizes_by_rank(rows: list[int], widths: list[int]) -> list[list[tuple[int, int]]]:
    """(row, tokens) of each row of each rank; a row is as long as the widest of its rank may be."""
    firsts = [sum(rows[:rank]) for rank in range(len(rows))]
    return [[(first + n, width) for n in range(own)] for first, own, width in zip(firsts, rows, widths, strict=True)]


def part(rows: list[tuple[int, int]]) -> dict[str, Tensor]:
    """These rows of one batch, as long as the longest of them."""
    draw = torch.Generator().manual_seed(0)
    everything = torch.randint(3, 9, (12, WIDEST), generator=draw)  # few tokens: memories meet targets
    starts = torch.rand(12, WIDEST, generator=draw) < 0.2
    width = max(length for _, length in rows)
    numbers = torch.tensor([row for row, _ in rows])
    mask = torch.arange(width) < torch.tensor([length for _, length in rows])[:, None]
    ids = everything[numbers, :width]
    targets = ids.roll(-1, 1).masked_fill(~mask | ~mask.roll(-1, 1), IGNORED)
    targets[:, -1] = IGNORED
    marks = {"attention_mask": mask.long(), "document_starts": starts[numbers, :width]}
    return {"input_ids": ids, "targets": targets, **marks}


def gradients(order: dict[str, Any], rank: int) -> None:
    """Writes the losses of the process' own rows, and the gradients of the loss of all."""
    processes, options = Processes(), order["model"]
    by_rank = sizes_by_rank(options["rows"], options["widths"])
    mine = by_rank[rank] if processes.count > 1 else [row for rows in by_rank for row in rows]
    torch.manual_seed(0)
    model = mnemic.augment(build(options["architecture"]).double(), mnemic.OutputMemory(**options["memory"])).train()
    torch.manual_seed(rank)
    losses = token_losses(model, **part(mine))[0]
    losses.sum().backward()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    processes.add(parameters)
    result = {
        "losses": [row[:length].tolist() for row, (_, length) in zip(losses, mine, strict=True)],
        "gradients": {name: p.grad.flatten().tolist() for name, p in parameters.items() if p.grad is not None},
    }
    Path(f"{order['out']}.{rank}.json").write_text(json.dumps(result))


def obey(order: dict[str, Any], rank: int) -> None:
    (gradients if order["kind"] == "gradients" else _train)(order, rank)


_plain_model, _train = group_process.make_model, group_process.train


# In the test


class MemoryGroup(Group):
    """The process that forks groups whose models have an output memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGroup]:
    made = MemoryGroup(tmp_path_factory.mktemp("group"))
    with made.process:
        yield made
    assert made.process.returncode == 0


BATCH = {"training": "batch", "local_dropout": 0.5}
CASES = {
    "two": {"rows": [2, 2], "widths": [7, 7], "memory": BATCH},
    "other rows": {"rows": [1, 3], "widths": [7, 7], "memory": BATCH},
    "other lengths": {"rows": [2, 1, 2], "widths": [5, 7, 4], "memory": BATCH},
    "never local": {"rows": [2, 2], "widths": [7, 6], "memory": {**BATCH, "local_dropout": 1.0}},
    "by distance": {"rows": [2, 2], "widths": [7, 7], "memory": {**BATCH, "similarity": "distance"}},
    "queries only": {"rows": [2, 2], "widths": [7, 7], "memory": {**BATCH, "memory_gradient": False}},
    "llama": {"rows": [2, 2], "widths": [7, 5], "memory": BATCH, "architecture": "llama"},
}


def all_losses(results: list[dict[str, Any]]) -> list[float]:
    return [loss for result in results for row in result["losses"] for loss in row]


@pytest.mark.parametrize("case", CASES)
def test_processes_have_the_losses_and_gradients_of_one(group: MemoryGroup, case: str) -> None:
    options = {"architecture": "gpt2", **CASES[case]}
    (one,) = group.train(1, "gradients", model=options)
    several = group.train(len(options["rows"]), "gradients", model=options)
    assert all_losses(several) == pytest.approx(all_losses([one]), rel=1e-10, abs=1e-12)
    for result in several:
        assert result["gradients"].keys() == one["gradients"].keys()
        for name, wanted in one["gradients"].items():
            assert result["gradients"][name] == pytest.approx(wanted, rel=1e-9, abs=1e-12), name


def test_the_other_rows_matter(group: MemoryGroup) -> None:
    """Else the test above would say nothing: without the rows of others, or their gradients, the numbers are others."""
    options = {"architecture": "gpt2", **CASES["two"]}
    (whole,) = group.train(1, "gradients", model=options)
    (half,) = group.train(1, "gradients", model={**options, "rows": [2, 0]})
    (into_queries,) = group.train(1, "gradients", model={**options, **CASES["queries only"]})
    assert all_losses([half]) != pytest.approx(all_losses([whole])[:14], rel=1e-3)
    assert all_losses([into_queries]) == all_losses([whole])
    name = "transformer.h.1.attn.c_proj.weight"
    assert into_queries["gradients"][name] != pytest.approx(whole["gradients"][name], rel=1e-2)


RUNS = {
    "batch": (BATCH, {"batching": "similar"}),
    "shuffled": ({**BATCH, "memory_gradient": False}, {"batching": "shuffled", "segment_length": 5}),
    "consecutive": ({"training": "consecutive", "long": 20}, {"batching": "consecutive", "consecutive": 2}),
    "local": ({"training": "local"}, {"accumulate": 2}),
}


@pytest.mark.parametrize("case", RUNS)
def test_two_processes_train_as_one_does(group: MemoryGroup, case: str) -> None:
    memory, config = RUNS[case]
    options = {"memory": {"plain_start": 0.2, **memory}, "xl_length": 0}  # the first of the eight steps is plain
    (one,) = group.train(1, model=options, **config)
    two = group.train(2, model=options, **config)
    check_same_run(one["out"], two[0]["out"])
    assert two[0]["report"] == two[1]["report"]
    (without,) = group.train(1, model={**options, "memory": {"training": "none"}}, **config)
    losses, plain = ([loss for _, loss in run["losses"]] for run in (one, without))
    assert losses[0] == plain[0]
    assert losses[1] != pytest.approx(plain[1], rel=1e-3)


def test_killed_and_resumed_draws_the_same_rows(group: MemoryGroup) -> None:
    options = {"memory": BATCH, "xl_length": 0}
    straight = group.train(2, model=options, batching="shuffled")[0]
    stopped = group.train(2, model=options, batching="shuffled", fault=("interrupt", 0, 5))
    assert stopped[0]["error"] == "KeyboardInterrupt"
    resumed = group.train(2, out=stopped[0]["out"], model=options, batching="shuffled", resume=True)[0]
    assert resumed["losses"] == straight["losses"]


@pytest.mark.parametrize("rank", [0, 1])
def test_no_process_waits_for_the_tokens_of_one_that_has_failed(group: MemoryGroup, rank: int) -> None:
    options = {"memory": BATCH, "xl_length": 0}
    for fault, whose, others in (("error", "ValueError", "FailedElsewhere"), ("kill", "killed", "FailedElsewhere")):
        results = group.train(2, model=options, batching="shuffled", fault=(fault, rank, 4))
        assert [results[place]["error"] for place in (rank, 1 - rank)] == [whose, others]


# By itself


def test_contexts_among_all_tokens_see_what_they_would_by_themselves() -> None:
    draw = torch.Generator().manual_seed(0)
    documents, segments = torch.randint(3, (1, 12), generator=draw), torch.arange(12)[None] // 4
    local = torch.rand(1, 12, generator=draw) < 0.5
    whole, part = torch.zeros(1, 12, 12), torch.zeros(1, 3, 12)
    Own(documents, segments, local).hide(whole, 0, 12)
    among = Among(documents, segments, local, 5)
    among.hide(part, 1, 4)
    assert torch.equal(part, whole[:, 6:9])
    assert 0 < torch.isinf(part).sum() < part.numel()
    assert among.end(3, 12) == 12


@pytest.mark.parametrize("dropped", [0.0, 0.3, 1.0])
def test_rows_go_without_local_memory_as_often_as_asked(dropped: float) -> None:
    torch.manual_seed(0)
    values = torch.full((2000, 2), NOTHING)
    _, sight = whole_batch(Piece(torch.zeros(2000, 2, 1), values, torch.zeros_like(values)), dropped)
    assert sight.local is not None
    local = sight.local.view(2000, 2)
    assert torch.equal(local[:, 0], local[:, 1])
    assert float(local.double().mean()) == pytest.approx(1 - dropped, abs=0.05 if 0 < dropped < 1 else 0)
    again = whole_batch(Piece(torch.zeros(2000, 2, 1), values, torch.zeros_like(values)), dropped)[1].local
    assert torch.equal(sight.local, again) == (dropped in (0, 1))  # drawn anew each time


if __name__ == "__main__":
    group_process.make_model, group_process.train = with_memory, obey
    group_process.main()
