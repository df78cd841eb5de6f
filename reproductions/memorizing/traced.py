"""One document as a trained model reads it with a large and with a smaller memory: for Figure 7 and Table 8."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memorizing.rows import memorizing
from tables.harness import machine
from tables.models import Model
from tables.readme import put_between
from tables.settings import Settings

import mnemic
from mnemic.files import write_text
from mnemic.train.report import commit, versions

Results = dict[str, Any]


def trace_document(settings: Settings, seed: int, runs: Path) -> tuple[Any, Results]:
    """The trace of the longest document of the test split, and what is known of it."""
    made = Model(memorizing("65K"), settings.varied("Isabelle+xl"), seed, runs)
    made.train()
    model = made.load()
    document = max(made.settings.text("home").open().documents("test"), key=lambda one: len(one.text))
    smaller = made.settings.memory["8192"]
    found = mnemic.trace(model, made.tokenizer, document, window=made.settings.evaluate["window"], smaller=smaller)
    known = {
        "document": document.id,
        "tokens": len(found.ids),
        "memory": made.settings.memory["65K"],
        "smaller": smaller,
        "loss": found.losses.sum().item() / (len(found.ids) - 1),
        "loss_smaller": (found.losses + found.gains).sum().item() / (len(found.ids) - 1),
        "settings": settings.to_dict(),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }
    return found, known


class Shown:
    """A row that shows what a trace holds: `measure` makes the results of it, `show` the text for the README."""

    def __init__(self, measure: Callable[[Any], Results], show: Callable[[Path, str, Results], str]) -> None:
        self.measure, self.show = measure, show

    def main(self, folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
        """Traces and writes the results."""
        settings = Settings.read(folder / f"{size}.toml")
        seed = (settings.seeds if seeds is None else seeds)[0]
        found, known = trace_document(settings, seed, runs)
        results = {"size": size, "seed": seed, **known, **self.measure(found)}
        write_text(folder / "results" / f"{size}.json", json.dumps(results) + "\n")

    def table(self, folder: Path, size: str) -> None:
        """Puts what was found in README.md."""
        results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
        put_between(folder / "README.md", self.show(folder, size, results))
