"""Figures 2 and 4 to 7: what translation models do with their memory tokens, layer by layer.

The pictures are of one sentence; the figures are means over the first sentences of the test split.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from memory_transformer.rows import memory
from tables.harness import machine
from tables.models import Model
from tables.readme import put_between, short
from tables.settings import Settings

import mnemic
from mnemic.files import write_text
from mnemic.train.report import commit, versions
from mnemic.train.terminal import say

MODELS = {"MemTransformer 10": (memory(10), "base"), "MemBottleneck 20": (memory(20, "bottleneck"), "small")}
SENTENCES = {"smoke": 2}
MOST = 64
SHARES = ("write", "process", "read")


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Trains the models of Table 1, if that is not done, and reads sentences with them."""
    settings = Settings.read(folder / f"{size}.toml")
    seed = (seeds or settings.seeds)[0]
    pairs = list(islice(settings.text("home").open().pairs(settings.split or "test"), SENTENCES.get(size, MOST)))
    (folder / "results").mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    even: dict[str, float] = {}  # the memory's share of all that can be attended to
    for label, (trained, variant) in MODELS.items():
        say(f"Figures ({size}), seed {seed}: {label}")
        made = Model(trained, settings.varied(variant if settings.has(variant) else "small"), seed, runs)
        made.train()
        model = made.load().eval()
        maps = [mnemic.attention_maps(model, made.tokenizer, pair.source.text) for pair in pairs]
        found[label] = {stack: layers(maps, stack) for stack in maps[0].with_memory}
        even[label] = mean(one["encoder"].memory_keys / one["encoder"].weights.shape[-1] for one in maps)
        for stack in maps[0].with_memory:
            maps[0].plot(folder / "results" / picture(size, label, stack), stack)
        maps[0].plot_summary(folder / "results" / picture(size, label, "summary"))
    results = {"size": size, "seed": seed, "sentences": len(pairs), "sentence": pairs[0].source.text, "layers": found}
    results["even"] = even
    results |= {"settings": settings.to_dict(), "commit": commit(), "versions": versions(), "machine": machine()}
    write_text(folder / "results" / f"{size}.json", json.dumps(results, indent=2) + "\n")


def layers(maps: list[Any], stack: str) -> list[dict[str, Any]]:
    """The shares and the strengths of operations in each layer of a stack, as means over sentences."""
    read = [one[stack].summary() for one in maps]
    rows = []
    for layer in zip(*read, strict=True):
        shares = {name: None if layer[0][name] is None else mean(one[name] for one in layer) for name in SHARES}
        strengths = {name: mean(one["operations"][name] for one in layer) for name in layer[0]["operations"]}
        rows.append(shares | {"operations": strengths})
    return rows


def picture(size: str, label: str, what: str) -> str:
    """The name of a picture's file."""
    return f"{size}-{label.lower().replace(' ', '-')}-{what}.png"


def table(folder: Path, size: str) -> None:
    """Puts the figures and the pictures in README.md."""
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    kinds = list(next(iter(results["layers"].values()))["encoder"][0]["operations"])
    head = ["model", "stack", "layer", *SHARES, *(f"{kind}, strength" for kind in kinds if kind not in SHARES)]
    lines = [head, ["---"] * len(head)]
    for label, stacks in results["layers"].items():
        for stack, rows in stacks.items():
            for number, row in enumerate(rows):
                shares = ["" if row[name] is None else f"{row[name]:.2f}" for name in SHARES]
                strengths = [f"{row['operations'][kind]:.2f}" for kind in kinds if kind not in SHARES]
                lines.append([label, stack, str(number), *shares, *strengths])
    known = f"Size: {size}. Seed: {results['seed']}. Sentences: {results['sentences']}. "
    made = [
        *(f"| {' | '.join(row)} |" for row in lines),
        "",
        known + f"Commit: {short(results['commit'])}.",
        "",
        "Attention that is spread evenly would have the memory's share of all that stands there: process and read "
        + ", ".join(f"{share:.2f} ({label})" for label, share in results["even"].items())
        + ", write what is left.",
    ]
    for label, stacks in results["layers"].items():
        for what in ("summary", *stacks):
            made += ["", f"![{label}: {what}](results/{picture(size, label, what)})"]
    put_between(folder / "README.md", "\n".join(made))
