"""Figure 3: training curves of a pretrained model that is given PKM, ResM, or ResM with a new feed-forward (ResM')."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from product_keys.rows import MODELS, RENEWED
from tables.harness import machine
from tables.models import Model
from tables.readme import put_between
from tables.settings import Settings

from mnemic.files import write_text
from mnemic.train.report import commit, versions
from mnemic.train.terminal import say

CURVES = {"PKM": MODELS["(e) + Init + PKM"], "ResM": MODELS["(f) + Init + ResM"], "ResM'": RENEWED}
SHOWN = 8  # columns of the table
SMOOTH = 8  # lines of the log in a point of the picture


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Trains the three models, if they are not there, and keeps the losses of their training."""
    settings = Settings.read(folder / f"{size}.toml")
    seed = (seeds or settings.seeds)[0]
    curves = {}
    for name, trained in CURVES.items():
        say(f"Figure 3 ({size}), seed {seed}: {name}")
        report = Model(trained, settings, seed, runs).train()
        curves[name] = [(entry["step"], entry["loss"]) for entry in report["losses"]]
    results = {"size": size, "seed": seed, "curves": curves, "settings": settings.to_dict()}
    results |= {"commit": commit(), "versions": versions(), "machine": machine()}
    write_text(folder / "results" / f"{size}.json", json.dumps(results) + "\n")


def table(folder: Path, size: str) -> None:
    """Draws the curves, and puts them and the perplexity at some steps in README.md."""
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    curves = results["curves"]
    draw(curves, folder / "results" / f"{size}.png")
    points = len(next(iter(curves.values())))
    every = max(points // SHOWN, 1)
    parts = [range(first, min(first + every, points)) for first in range(0, points, every)][:SHOWN]
    steps = [next(iter(curves.values()))[part[-1]][0] for part in parts]
    lines = [
        f"| perplexity up to step | {' | '.join(f'{step:,}' for step in steps)} |",
        "|---" * (len(parts) + 1) + "|",
    ]
    for name, curve in curves.items():
        figures = [math.exp(mean(curve[place][1] for place in part)) for part in parts]
        lines.append(f"| {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    known = f"Size: {size}. Seed: {results['seed']}. Commit: {(results['commit'] or 'unknown')[:10]}. "
    known += "Of hidden tokens of the training text."
    put_between(folder / "README.md", "\n".join([*lines, "", known, "", f"![Curves](results/{size}.png)"]))


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """The perplexity by step, a moving average."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        width = min(SMOOTH, len(curve))
        smooth = [math.exp(mean(loss for _, loss in curve[i : i + width])) for i in range(len(curve) - width + 1)]
        axes.plot([step for step, _ in curve[width - 1 :]], smooth, label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="perplexity of hidden tokens", yscale="log")
    axes.legend()
    figure.savefig(path)
