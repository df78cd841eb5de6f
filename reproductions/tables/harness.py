"""Runs a table of a paper: trains, tunes on valid what is tuned, measures, writes results/<size>.json.

The file is written after each measurement. Killed and started again, a run goes on: models and stores from where they
stopped, and what was measured with the same settings is not measured again, also for another table. Several processes
may run the same table at a time, each another part of it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tables.models import Model, Trained, described
from tables.readme import put_table
from tables.settings import Settings, identity

import mnemic
from mnemic.augment import augment
from mnemic.errors import UsageError
from mnemic.evaluate import evaluate
from mnemic.evaluate.config import METRICS
from mnemic.evaluate.tuning import default_grid
from mnemic.files import lock, write_text
from mnemic.memories.output.testing import Grid
from mnemic.train.report import commit, versions
from mnemic.train.terminal import say

TUNED = ("long", "k", "temperature", "weight", "mix_temperature", "recent_weight", "recent_temperature")


@dataclass(frozen=True)
class Testing:
    """The memory of testing."""

    local: bool = True
    long: float = 0.0  # the largest long-term memory that is tried, as a share of the settings' largest
    store: str = ""  # home or other: the text whose rows are the external memory
    joint: bool = True  # in the softmax, as in TRIME; or mixed in alone, as in kNN-LM and the continuous cache
    tune_long: bool = True  # or all of `long` is taken

    def config(self, settings: Settings, store: Any) -> mnemic.OutputMemory:
        """The memory before it is tuned."""
        recent = {"local": self.local, "long": round(self.long * settings.long)}
        if self.joint:
            return mnemic.OutputMemory(external=store, k=settings.k, **recent)
        if not self.store:
            return mnemic.OutputMemory.cache(**recent)
        apart = {"recent_weight": 0.5} if self.local else {}
        return mnemic.OutputMemory.knn(store, k=settings.k, **recent, **apart)

    def grid(self, memory: mnemic.OutputMemory) -> Grid:
        """What is tried."""
        grid = default_grid(memory)
        return grid if self.tune_long else Grid(grid.temperatures, (memory.long,), grid.ks)


CACHE = Testing(joint=False)
CACHE_LONG = Testing(long=1, joint=False)
KNN = Testing(local=False, store="home", joint=False)
KNN_CACHE = Testing(store="home", joint=False)
TRIME = Testing()
TRIME_LONG = Testing(long=1)
TRIME_EXT = Testing(long=1, store="home")


@dataclass(frozen=True)
class Row:
    """One model with one memory, and the paper's figures for it by column; None where the paper has none.

    A table whose columns are measurements of their own has several rows with the same label.
    """

    label: str
    trained: Trained
    testing: Testing | None  # None: the model as it is, without a memory
    paper: dict[str, float | None]
    variant: str = ""  # of the settings
    against: str = ""  # the label of the row that its change is against; empty: the table's first
    count: int | None = None  # memory tokens in testing; None: those that it was trained with


@dataclass(frozen=True)
class Table:
    """A table of the paper: its rows, and where in the results of an evaluation the figure of each column stands.

    A place is split/figure/..., as in "valid/perplexity"; settings may name another split.
    """

    name: str
    columns: dict[str, str]
    rows: Sequence[Row]
    change: str = ""  # the column whose change against the first row, or another, is shown
    scale: float = 1.0  # that figures are multiplied with to be those of the paper

    def key(self, row: Row) -> str:
        """What a row is called in the results."""
        return row.label if len(row.paper) == len(self.columns) else f"{row.label}: {', '.join(row.paper)}"

    def main(self, folder: Path, size: str, seeds: Sequence[int] | None, runs: Path, only: str = "") -> None:
        """Runs what is not in the results: the key `only`, or else all keys that it is a part of.

        What other settings made is left out of the results.
        """
        settings = Settings.read(folder / f"{size}.toml")
        path = folder / "results" / f"{size}.json"

        def of(row: Row, seed: int) -> Measurement:
            return Measurement(self, row, settings.varied(row.variant), seed, runs)

        rows = [row for row in self.rows if settings.has(row.variant)]

        def done() -> dict[str, Any]:
            """What has been measured with these settings, by whichever process."""
            old, found = read_results(path).get("measurements", {}), dict[str, Any]()
            for row in rows:
                before = old.get(self.key(row), {}).items()
                found[self.key(row)] = {s: made for s, made in before if made["identity"] == of(row, int(s)).identity}
            return found

        asked = [row for row in rows if self.key(row) == only] or [row for row in rows if only in self.key(row)]
        if not asked:
            raise UsageError(f"--only {only}: expected a part of one of these: {'; '.join(map(self.key, rows))}")
        for seed in settings.seeds if seeds is None else seeds:
            for row in asked:
                if str(seed) in done()[self.key(row)]:
                    continue
                say(f"{self.name} ({size}), seed {seed}: {self.key(row)}")
                made = of(row, seed).make()
                with lock(runs / "results.lock", "the results", wait=True):
                    found = done()
                    found[self.key(row)][str(seed)] = made
                    results = {"table": self.name, "size": size, "settings": settings.to_dict(), "measurements": found}
                    write_text(path, json.dumps(results, indent=2) + "\n")

    def table(self, folder: Path, size: str) -> None:
        """Puts the results beside the paper's figures in README.md."""
        put_table(folder / "README.md", self, read_results(folder / "results" / f"{size}.json"), size)


class Measurement:
    """A row of a table, for one seed."""

    def __init__(self, table: Table, row: Row, settings: Settings, seed: int, runs: Path) -> None:
        self.testing, self.settings, self.count = row.testing, settings, row.count
        self.places = {column: in_split(table.columns[column], settings.split) for column in row.paper}
        self.model = Model(row.trained, settings, seed, runs)
        self.tested: list[Any] = [described(settings.text(settings.tested)), settings.evaluate]
        if (testing := row.testing) is not None:
            self.tested += [testing.config(settings, None).to_dict(), testing.tune_long, settings.tune]
            if testing.store:
                self.tested += [described(settings.text(testing.store)), settings.store]
        if row.count is not None:
            self.tested.append(row.count)
        self.identity = identity(self.model.identity, self.tested, sorted(self.places.values()))
        self._loaded: Any = None
        self._store: Any = None

    def make(self) -> dict[str, Any]:
        """Trains, tunes and measures; all that came out."""
        began = time.monotonic()
        report = self.model.train()
        try:
            tuned = None if self.testing is None else self.model.kept(["tuned", self.tested], self.tune)
            splits = {split: self.evaluate(split, tuned) for split in self.splits()}
        finally:
            if self._store is not None:
                self._store.close()
        return {
            "identity": self.identity,
            "model": self.model.folder.name,
            "figures": {column: at(splits, place) for column, place in self.places.items()},
            "tuned": tuned,
            "splits": splits,
            "training": {name: report[name] for name in ("step", "tokens", "seconds", "tokens_per_second", "commit")}
            | {"loss": report["losses"][-1]["loss"], "parameters": report["parameters"]["all"]},
            "seconds": time.monotonic() - began,
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
        }

    @property
    def usual(self) -> str:
        """The metric of which each kind of model has one."""
        return "masked_loss" if self.model.masked else "perplexity"

    def splits(self) -> list[str]:
        """The splits that figures are of."""
        return sorted({place.split("/")[0] for place in self.places.values()})

    def loaded(self, **tuned: Any) -> Any:
        """The trained model with the memory of testing, with these settings of it."""
        if self._loaded is None:
            self._loaded, testing = self.model.load(), self.testing
            if self.count is not None:
                torch.manual_seed(self.model.seed)  # tokens that it was not trained with are drawn
                self._loaded.memory.change("tokens", count=self.count)
            if testing is not None and testing.store:
                self._store = self.model.store(self._loaded, testing.store, "ip" if testing.joint else "l2")
        if self.testing is None:
            return self._loaded
        return augment(self._loaded, self.testing.config(self.settings, self._store).changed(**tuned))

    def text(self, split: str, **changes: Any) -> tuple[Any, Any, mnemic.EvaluateConfig]:
        """The tokenizer, the corpus and how it is read."""
        corpus = self.settings.text(self.settings.tested).open()
        how = mnemic.EvaluateConfig(**{**self.settings.evaluate, "split": split, **changes})
        return self.model.tokenizer, corpus, how

    def tune(self) -> dict[str, Any]:
        """The settings of the memory that are best on valid."""
        model = self.loaded()
        grid = self.testing.grid(model.memory.output.config)  # type: ignore[union-attr]
        found = mnemic.tune(model, *self.text("valid", **self.settings.tune), grid)
        return {
            "settings": {name: getattr(found.memory, name) for name in TUNED},
            "perplexity": found.perplexity,
            "tried": found.tried,
            "at_the_edge": found.at_the_edge,
            "store_rows": None if self._store is None else len(self._store),
        }

    def evaluate(self, split: str, tuned: dict[str, Any] | None) -> dict[str, Any]:
        """The figures of a split, and how fast they were made."""
        places = [place.split("/") for place in self.places.values()]
        metrics = sorted({name for first, name, *_ in places if first == split and name in METRICS} | {self.usual})
        found: dict[str, Any] = {}
        for metric in metrics:
            measure = partial(self.measure, split, metric, tuned["settings"] if tuned else {})
            found |= self.model.kept([split, metric, self.tested], measure)
        tokens = found["masked_tokens" if self.model.masked else "tokens"]
        return found | {"tokens_per_second": tokens / found["seconds"]}

    def measure(self, split: str, metric: str, tuned: dict[str, Any]) -> dict[str, Any]:
        """The figures of one metric, and the seconds that the usual one takes."""
        model, (tokenizer, corpus, how) = self.loaded(**tuned), self.text(split, metrics=[metric])
        began = time.monotonic()
        result = evaluate(model, tokenizer, corpus, how)
        seconds = {"seconds": time.monotonic() - began} if metric == self.usual else {}
        known = {*how.to_dict(), "versions", "model", "corpus"}
        return {name: value for name, value in result.items() if name not in known} | seconds


def in_split(place: str, split: str | None) -> str:
    """A place, in another split if one is named."""
    return place if split is None else "/".join([split, *place.split("/")[1:]])


def at(results: dict[str, Any], place: str) -> Any:
    """The figure at a place, as split/figure/..."""
    found: Any = results
    for name in place.split("/"):
        found = found[name]
    return found


def read_results(path: Path) -> dict[str, Any]:
    """What a results file holds; nothing if there is none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def machine() -> dict[str, Any]:
    """The machine that measured."""
    return {"platform": platform.platform(), "processor": platform.machine(), "processors": os.cpu_count()}
