"""Figure 2: at which checkpoint of its pretraining each slot was some token's best for the last time."""

import json
from collections.abc import Sequence
from pathlib import Path

from product_keys.rows import MODELS
from tables.harness import machine
from tables.models import Model
from tables.readme import put_between
from tables.settings import Settings

import mnemic
from mnemic.analysis.usage import plot_staleness, staleness_of_run
from mnemic.files import write_text
from mnemic.train.report import commit, versions
from mnemic.train.terminal import say

NAMES = [name for name, trained in MODELS.items() if trained.product_keys]


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Trains the models of Table 2, if they are not there, and looks into their checkpoints."""
    settings = Settings.read(folder / f"{size}.toml")
    seed = (seeds or settings.seeds)[0]
    how = mnemic.EvaluateConfig(**{**settings.evaluate, "split": "test"})
    found = {}
    for name in NAMES:
        say(f"Figure 2 ({size}), seed {seed}: {name}")
        made = Model(MODELS[name], settings, seed, runs)
        made.train()
        found[name] = staleness_of_run(made.load(), made.tokenizer, settings.text("home").open(), made.folder, how)
    results = {"size": size, "seed": seed, "stale": found, "settings": settings.to_dict()}
    results |= {"commit": commit(), "versions": versions(), "machine": machine()}
    write_text(folder / "results" / f"{size}.json", json.dumps(results, indent=2) + "\n")


def table(folder: Path, size: str) -> None:
    """Draws the histogram, and puts it and its numbers in README.md."""
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    plot_staleness(results["stale"], folder / "results" / f"{size}.png")
    steps = next(iter(results["stale"].values()))["steps"]
    lines = [
        f"| model | layer | never | {' | '.join(f'{step:,}' for step in steps)} |",
        "|---|---" * 1 + "|---" * (len(steps) + 1) + "|",
    ]
    for name, found in results["stale"].items():
        for layer, slots in found["layers"].items():
            lines.append(f"| {name} | {layer} | {' | '.join(f'{count / sum(slots):.1%}' for count in slots)} |")
    known = (
        f"Size: {size}. Seed: {results['seed']}. Commit: {(results['commit'] or 'unknown')[:10]}. Shares of the slots."
    )
    put_between(folder / "README.md", "\n".join([*lines, "", known, "", f"![Last uses](results/{size}.png)"]))
