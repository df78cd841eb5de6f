"""Retrieval over many segments: facts that stand in the first one are asked for in a later one.

It is not in the paper, whose memory ends with a segment. Beside recurrent memory tokens: the model without memory, with
an XL cache of one segment, and with an attention memory of the whole document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tables import facts
from tables.harness import machine, read_results
from tables.models import Model, Trained
from tables.readme import put_between, said
from tables.settings import Settings

from mnemic.data import tokenize_corpus
from mnemic.evaluate.perplexity import carried_windows
from mnemic.files import write_text
from mnemic.hf.losses import IGNORED
from mnemic.train.objectives import NextToken
from mnemic.train.report import commit, versions
from mnemic.train.state import untouched
from mnemic.train.terminal import say

MODELS = {
    "no memory": (Trained("plain", "documents"), ""),
    "XL cache of a segment": (Trained("xl", "documents"), "xl"),
    "attention memory": (Trained("attention", "documents", attention={"size": "facts"}), ""),
    "recurrent memory tokens": (Trained("recurrent", "documents", tokens={"segment": 32, "count": 6}), ""),
}
DISTANCES = {"smoke": (0, 1)}
USUAL = (0, 1, 2, 4, 8, 16, 32, 64)  # segments between a fact and the question
DOCUMENTS = 50  # of each distance
SURE = 0.5  # an answer is right that is given more than half of the probability


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Trains each model and asks it; what is in the results already is not done again."""
    settings = Settings.read(folder / f"{size}.toml")
    path = folder / "results" / f"{size}.json"
    found = read_results(path)
    if not found or Settings.from_dict(found["settings"]) != settings:
        found = {"size": size, "settings": settings.to_dict(), "measurements": {label: {} for label in MODELS}}
    for seed in settings.seeds if seeds is None else seeds:
        for label, (trained, variant) in MODELS.items():
            if str(seed) in found["measurements"][label]:
                continue
            say(f"Retrieval ({size}), seed {seed}: {label}")
            made = Model(trained, settings.varied(variant), seed, runs)
            found["measurements"][label][str(seed)] = measured(made, size)
            write_text(path, json.dumps(found, indent=2) + "\n")


def measured(made: Model, size: str) -> dict[str, Any]:
    """What a model answers after each distance, and what made it."""
    began, report = time.monotonic(), made.train()
    segment = made.settings.train["segment_length"]
    return {
        "right": {str(distance): right(made, segment, distance) for distance in DISTANCES.get(size, USUAL)},
        "training": {name: report[name] for name in ("step", "tokens", "seconds")}
        | {"parameters": report["parameters"]["all"]},
        "seconds": time.monotonic() - began,
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def right(made: Model, segment: int, distance: int) -> float:
    """The share of questions that a model answers after so many segments."""
    model, tokens = made.load(), tokenize_corpus(facts.asked_once(segment, distance, DOCUMENTS), made.tokenizer)
    objective, read = NextToken(model, made.tokenizer, 0), []
    with untouched(model):
        for batch, carry in carried_windows(tokens, segment, segment, DOCUMENTS, objective):
            assert not (batch["targets"] == IGNORED).any()
            read.append(objective.losses(batch, carry))
    answers = [-2 - 3 * number for number in range(facts.FACTS)]  # before the end token, each behind "? key"
    return (torch.cat(read, 1)[:, answers].neg().exp() > SURE).float().mean().item()


def table(folder: Path, size: str) -> None:
    """Puts the shares in README.md."""
    results = read_results(folder / "results" / f"{size}.json")
    distances = [str(distance) for distance in DISTANCES.get(size, USUAL)]
    rows = [["model", "parameters", *distances], ["---"] * (2 + len(distances))]
    for label, seeds in results["measurements"].items():
        if not seeds:
            rows.append([label, "", *("not run" for _ in distances)])
            continue
        parameters = next(iter(seeds.values()))["training"]["parameters"]
        shares = [spread([100 * made["right"][distance] for made in seeds.values()]) for distance in distances]
        rows.append([label, f"{parameters:,}", *shares])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    put_between(folder / "README.md", "\n".join([*lines, "", said(results, size)]))


def spread(shares: Sequence[float]) -> str:
    """The mean, with the least and the largest where they differ."""
    least, largest = (f"{share:.0f}" for share in (min(shares), max(shares)))
    return least if least == largest else f"{mean(shares):.0f} ({least} to {largest})"
