"""Step time: a training step by the size of a full memory."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from memorizing.rows import PLAIN
from tables.harness import machine
from tables.models import Model
from tables.readme import put_between
from tables.settings import Settings

import mnemic
from mnemic.files import write_text
from mnemic.hf.losses import token_losses
from mnemic.train.report import commit, versions

PAPER = {"none": 0.20, "8192": 0.25, "65K": 0.60}
STEPS, TURNS = 3, 3


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Measures all sizes in turns, and keeps the fastest step of each."""
    settings = Settings.read(folder / f"{size}.toml")
    made = Model(PLAIN, settings, 0, runs)
    memories = {"none": 0, **settings.memory}
    rows, length = made.config.batch_size, made.config.segment_length
    ids = _tokens(made, rows, max(memories.values()) + (STEPS * TURNS + 1) * length)
    steps = {name: _Steps(made, ids, held) for name, held in memories.items()}
    seconds: dict[str, list[float]] = {name: [] for name in memories}
    for _ in range(TURNS):
        for name, one in steps.items():
            seconds[name] += [one.step() for _ in range(STEPS)]
    results = {"size": size, "memory": memories, "seconds": seconds, "settings": settings.to_dict()}
    results |= {"commit": commit(), "versions": versions(), "machine": machine()}
    write_text(folder / "results" / f"{size}.json", json.dumps(results, indent=2) + "\n")


class _Steps:
    """A model with a full memory, and training steps of it."""

    def __init__(self, made: Model, ids: torch.Tensor, held: int) -> None:
        self.model, self.length, self.ids = made.begun(), made.config.segment_length, ids
        self.more: dict[str, Any] = {}
        if held:
            mnemic.augment(self.model, mnemic.KNNAttention(size=held))
            self.more = {"memory_state": self.model.memory.new_state(len(ids))}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.model.train()
        with torch.no_grad():
            for _ in range(held // self.length):
                self._loss()

    def _loss(self) -> torch.Tensor:
        part, self.ids = self.ids[:, : self.length + 1], self.ids[:, self.length :]
        losses, _ = token_losses(self.model, part[:, 1:], input_ids=part[:, :-1], use_cache=False, **self.more)
        return losses.mean()

    def step(self) -> float:
        """The seconds of one step."""
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self._loss().backward()
        self.optimizer.step()
        return time.perf_counter() - began


def _tokens(made: Model, rows: int, length: int) -> torch.Tensor:
    """Text of the corpus, (rows, length); it is read again from its beginning where it is too short."""
    found: list[int] = []
    while len(found) < rows * length:
        for document in made.settings.text("home").open().documents("train"):
            found += made.tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
            if len(found) >= rows * length:
                break
    return torch.tensor(found[: rows * length]).view(rows, length)


def table(folder: Path, size: str) -> None:
    """Puts the times in README.md."""
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    least = {name: min(found) for name, found in results["seconds"].items()}
    lines = ["| memory, paper | step, paper | memory, ours | step, ours |", "|---|---|---|---|"]
    for name, found in least.items():
        paper = f"{PAPER[name]:.2f} s ({PAPER[name] / PAPER['none']:.2f}x)" if name in PAPER else "–"
        lines.append(
            f"| {name} | {paper} | {results['memory'][name]:,} | {found:.3f} s ({found / least['none']:.2f}x) |"
        )
    known = (
        f"Size: {size}. Commit: {(results['commit'] or 'unknown')[:10]}. Fastest of {STEPS * TURNS} steps, in turns."
    )
    put_between(folder / "README.md", "\n".join([*lines, "", known]))
