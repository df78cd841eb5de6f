"""Retrieval over many segments: facts that stand in the first one are asked for in a later one.

It is not in the paper, whose memory ends with a segment. Beside recurrent memory tokens: the model without memory, with
an XL cache of one segment, and with an attention memory of the whole document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tables import facts
from tables.harness import machine
from tables.models import Model, Trained
from tables.readme import put_between
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
    """Trains each model and asks it."""
    settings = Settings.read(folder / f"{size}.toml")
    (folder / "results").mkdir(exist_ok=True)
    distances = DISTANCES.get(size, USUAL)
    models: dict[str, dict[str, Any]] = {label: {} for label in MODELS}
    for seed in settings.seeds if seeds is None else seeds:
        for label, (trained, variant) in MODELS.items():
            say(f"Retrieval ({size}), seed {seed}: {label}")
            made = Model(trained, settings.varied(variant), seed, runs)
            report, segment = made.train(), settings.train["segment_length"]
            shares = {str(distance): right(made, segment, distance) for distance in distances}
            training = {"step": report["step"], "tokens": report["tokens"], "seconds": report["seconds"]}
            training |= {"parameters": report["parameters"]["all"]}
            models[label][str(seed)] = {"right": shares, "training": training}
    results = {"size": size, "models": models, "settings": settings.to_dict()}
    results |= {"commit": commit(), "versions": versions(), "machine": machine()}
    write_text(folder / "results" / f"{size}.json", json.dumps(results, indent=2) + "\n")


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
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    distances = list(next(iter(next(iter(results["models"].values())).values()))["right"])
    rows = [["model", "parameters", *distances], ["---"] * (2 + len(distances))]
    for label, seeds in results["models"].items():
        parameters = next(iter(seeds.values()))["training"]["parameters"]
        shares = [" ± ".join(said(100 * seed["right"][distance] for seed in seeds.values())) for distance in distances]
        rows.append([label, f"{parameters:,}", *shares])
    known = f"Size: {size}. Seeds: {', '.join(next(iter(results['models'].values())))}. "
    known += f"Commit: {(results['commit'] or 'unknown')[:10]}. Processors: {results['machine']['processors']}."
    put_between(folder / "README.md", "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", known]))


def said(shares: Any) -> list[str]:
    """The mean, and the half of the range."""
    found = list(shares)
    half = (max(found) - min(found)) / 2
    return [f"{mean(found):.0f}"] + ([f"{half:.0f}"] if len(found) > 1 else [])
