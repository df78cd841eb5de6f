"""Encoders that learn tasks, with memories of before or new ones for the task: each is trained once for all tables.

runs/<encoder>/tasks/<task>-<settings>-<trainable>-seed<seed>/    the run of `mnemic.train`
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch
from tables.harness import machine, read_results
from tables.models import PLAIN, Model, Trained, alone, unusual
from tables.pretrained import PRETRAINED, encoder_source
from tables.readme import NOT_RUN, put_between
from tables.settings import Settings, identity

import mnemic
from mnemic.augment import augment
from mnemic.cli.loading import load_model
from mnemic.data import load_tokenizer
from mnemic.data.tasks import Example, Task
from mnemic.errors import UsageError
from mnemic.files import lock, write_text
from mnemic.memories.config import MemoryConfig
from mnemic.train import train
from mnemic.train.report import commit, versions
from mnemic.train.terminal import no_other_bars, say

MADE, MADE_SCORES = "made", "made scores"  # tasks that need no files
METRICS = ("accuracy", "matthews", "f1")


def _made(split: str, scores: bool = False) -> Iterator[Example]:
    draw = random.Random(split)
    for number in range(12):
        label = number % 2
        words = [draw.choice(["a", "day", "of", "rain"]) for _ in range(3)] + [("sad", "glad")[label]]
        score = float(words.count("rain") + label)
        yield Example(f"{split}:{number}", " ".join(words), label=score if scores else label)


def made_task(source: str) -> Task:
    """Words that are sad or glad, or how much rain there is."""
    scores = source == MADE_SCORES
    parts = {split: partial(_made, split, scores) for split in ("train", "valid")}
    return Task(source, parts, *((), ("pearson", "spearman")) if scores else (("sad", "glad"), METRICS))


class Encoder:
    """An encoder that others have trained, whole: one with a head for hidden tokens lacks what BERT labels texts by."""

    def __init__(self, settings: Settings, runs: Path) -> None:
        self.settings, self.name = settings, settings.model.removeprefix(PRETRAINED)
        self.folder = runs / f"encoder-{self.name}"

    def train(self) -> None:
        """Does nothing: that is done."""

    def load(self) -> str:
        """Where it is."""
        return encoder_source(self.name)

    @cached_property
    def tokenizer(self) -> Any:
        """Its own."""
        return load_tokenizer(self.load())


class FineTuned:
    """A model that has learned a task, or learns it when it is asked for; `memories` are new and only for the task."""

    def __init__(
        self,
        encoder: Model | Encoder,
        task: str,
        seed: int,
        trainable: str = "all",
        memories: Sequence[MemoryConfig] = (),
    ) -> None:
        self.encoder, self.name, self.seed, self.trainable = encoder, task, seed, trainable
        self.memories = memories
        self.options = {**encoder.settings.tasks[task], "trainable": trainable, "seed": seed}
        self.source, self.most = self.options.pop("source", task), self.options.pop("examples", None)
        added = [[memory.memory(), unusual(memory)] for memory in memories]
        known = identity(self.options, self.source, self.most, *added)
        short = f"{task.replace('/', '-')}-{known}-{trainable}-seed{seed}"
        self.folder = encoder.folder / "tasks" / short

    @cached_property
    def task(self) -> Any:
        """The task, with the first `examples` of its training split if it is cut."""
        if self.source in (MADE, MADE_SCORES):
            return made_task(self.source)
        whole = mnemic.open_task(self.source)
        if self.most is None:
            return whole
        first = {"train": lambda: islice(whole.examples("train"), self.most), "valid": lambda: whole.examples("valid")}
        return Task(whole.name, first, whole.labels, whole.metrics, whole.kind)

    def train(self) -> dict[str, Any]:
        """Trains the model on the task, or goes on with it, unless that is done; its report."""
        self.encoder.train()
        with alone(self.folder):
            if (self.folder / "model").is_dir():
                report: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
                return report
            how = replace(mnemic.fine_tuning(self.task, **self.options), out=str(self.folder), resume=True)
            torch.manual_seed(self.seed)
            with no_other_bars():
                model = mnemic.with_head(self.encoder.load(), self.task)
                if self.memories:
                    augment(model, *self.memories)
                return dict(train(model, self.encoder.tokenizer, self.task, how).report)

    def load(self) -> Any:
        """The trained model."""
        self.train()
        with no_other_bars():
            return load_model(str(self.folder))[0]

    def figures(self) -> dict[str, Any]:
        """What the task measures on its dev split, and the usage of the memory there."""
        path = self.folder / "figures.json"
        if not path.exists():
            model, metrics = self.load(), ["task"]
            if hasattr(getattr(model, "memory", None), "product_keys"):
                metrics.append("memory_usage")
            found = mnemic.evaluate(model, self.encoder.tokenizer, self.task, metrics=metrics, batch_size=32)
            kept = [*self.task.metrics, "accuracy_mismatched", "exact_match", "f1", "memory_usage"]
            write_text(path, json.dumps({name: found[name] for name in kept if name in found}) + "\n")
        return dict(json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class TaskRow:
    """A model of a table, and the paper's figures for it by column; None where the paper has none.

    With `trained` None it is the settings' encoder as it is.
    """

    label: str
    trained: Trained | None
    paper: dict[str, float | None]
    trainable: str = "all"
    memories: Sequence[MemoryConfig] = ()  # that it gets for the task

    def fine_tuned(self, settings: Settings, task: str, seed: int, runs: Path) -> FineTuned:
        """The model on a task."""
        encoder: Model | Encoder
        if self.trained is None and settings.model.startswith(PRETRAINED):
            encoder = Encoder(settings, runs)
        else:
            encoder = Model(self.trained or PLAIN, settings, 0, runs)
        return FineTuned(encoder, task, seed, self.trainable, self.memories)


@dataclass(frozen=True)
class TaskTable:
    """A table of figures of fine-tuned models: the median or the mean over seeds, as in the paper.

    A column is of a task, and finds its figure in what `FineTuned.figures` gives.
    """

    name: str
    columns: dict[str, tuple[str, Callable[[dict[str, Any]], float]]]
    rows: Sequence[TaskRow]
    middle: Literal["median", "mean"] = "median"

    def cells(self, settings: Settings) -> Iterator[tuple[TaskRow, str]]:
        """The rows and tasks that the settings have."""
        for row in self.rows:
            for task in dict.fromkeys(task for task, _ in self.columns.values()):
                if task in settings.tasks and any(self.columns[column][0] == task for column in row.paper):
                    yield row, task

    def main(self, folder: Path, size: str, seeds: Sequence[int] | None, runs: Path, only: str = "") -> None:
        """Fine-tunes and measures what is not in the results: cells whose names have `only` in them."""
        settings, path = Settings.read(folder / f"{size}.toml"), folder / "results" / f"{size}.json"
        cells = [cell for cell in self.cells(settings) if only in ": ".join((cell[0].label, cell[1]))]
        if not cells:
            raise UsageError(f"--only {only}: expected a part of a model's name, or of {', '.join(settings.tasks)}")
        for seed in settings.seeds if seeds is None else seeds:
            for row, task in cells:
                tuned = row.fine_tuned(settings, task, seed, runs)
                say(f"{self.name} ({size}), seed {seed}: {row.label}: {task}")
                report, figures = tuned.train(), tuned.figures()
                kept = {name: report[name] for name in ("step", "seconds", "commit", "parameters")}
                made = {"figures": figures, "model": tuned.folder.name, "training": kept}
                with lock(runs / "results.lock", "the results", wait=True):
                    results = read_results(path) or {"measurements": {}}
                    known = results["measurements"].setdefault(row.label, {}).setdefault(task, {})
                    known[str(seed)] = made
                    results |= {"table": self.name, "size": size, "settings": settings.to_dict()}
                    results |= {"commit": commit(), "versions": versions(), "machine": machine()}
                    write_text(path, json.dumps(results, indent=2) + "\n")

    def table(self, folder: Path, size: str) -> None:
        """Puts the middle figures beside the paper's figures in README.md."""
        results = read_results(folder / "results" / f"{size}.json")
        head = ["model", *(f"{column}, {whose}" for column in self.columns for whose in ("paper", "ours"))]
        lines = [head, ["---"] * len(head)]
        for row in self.rows:
            line = [row.label]
            for column, (task, figure) in self.columns.items():
                paper = row.paper.get(column)
                seeds = results.get("measurements", {}).get(row.label, {}).get(task, {})
                found = [figure(made["figures"]) for made in seeds.values()] if column in row.paper else []
                line += ["–" if paper is None else f"{paper:.1f}", shown(found, column in row.paper, self.middle)]
            lines.append(line)
        known = f"Size: {size}. Not run yet."
        if results:
            used = sorted({int(s) for tasks in results["measurements"].values() for x in tasks.values() for s in x})
            known = f"Size: {size}. Seeds: {', '.join(map(str, used))}; the {self.middle}, least and largest. "
            known += f"Commit: {(results['commit'] or 'unknown')[:10]}."
        put_between(folder / "README.md", "\n".join([*(f"| {' | '.join(row)} |" for row in lines), "", known]))


def shown(found: list[float], wanted: bool, middle: str) -> str:
    """The median or the mean, with the least and the largest if there are several."""
    if not found:
        return NOT_RUN if wanted else ""
    figure = f"{(median if middle == 'median' else mean)(found):.1f}"
    return figure if len(found) == 1 else f"{figure} ({min(found):.1f} to {max(found):.1f})"


def share(name: str) -> Callable[[dict[str, Any]], float]:
    """A figure of the task, in percent."""
    return lambda figures: 100 * float(figures[name])


def of_layer(number: int, name: str, scale: float = 1.0) -> Callable[[dict[str, Any]], float]:
    """A figure of the memory's usage: of its first layer, its second, ..."""
    return lambda figures: scale * float(list(figures["memory_usage"].values())[number][name])
