"""Figure 4: how differently glad and sad sentences of SST-2 use the memory, before and after fine-tuning."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from product_keys.rows import MODELS
from tables.finetuned import FineTuned
from tables.harness import machine
from tables.models import Model
from tables.readme import put_between
from tables.settings import Settings

import mnemic
from mnemic.analysis.usage import apart, plot_apart, usage_by_class
from mnemic.files import write_text
from mnemic.train.report import commit, versions
from mnemic.train.terminal import say

NAMES = ("(e) + Init + PKM", "(f) + Init + ResM")
TASK = "glue/sst2"


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Fine-tunes the models, if that is not done, and counts the slots that each class reads."""
    settings = Settings.read(folder / f"{size}.toml")
    seed = (seeds or settings.seeds)[0]
    found = {}
    for name in NAMES:
        tuned = FineTuned(Model(MODELS[name], settings, 0, runs), TASK, seed)
        for when in ("before", "after"):
            say(f"Figure 4 ({size}), seed {seed}: {name}, {when}")
            tuned.encoder.train()
            torch.manual_seed(seed)
            model = mnemic.with_head(tuned.encoder.load(), tuned.task) if when == "before" else tuned.load()
            sad, glad = usage_by_class(model, tuned.encoder.tokenizer, tuned.task, batch_size=32).values()
            layers = {layer: apart(glad.layers[layer], sad.layers[layer]) for layer in glad.layers}
            found[f"{name}, {when} fine-tuning"] = layers
    results = {"size": size, "seed": seed, "apart": found, "settings": settings.to_dict()}
    results |= {"commit": commit(), "versions": versions(), "machine": machine()}
    write_text(folder / "results" / f"{size}.json", json.dumps(results, indent=2) + "\n")


def table(folder: Path, size: str) -> None:
    """Draws the bars, and puts them and their numbers in README.md."""
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    plot_apart(results["apart"], folder / "results" / f"{size}.png")
    layers = list(next(iter(results["apart"].values())))
    head = ["model", *(f"{figure}, layer {layer}" for figure in ("KL", "IOU") for layer in layers)]
    lines = [head, ["---"] * len(head)]
    for name, found in results["apart"].items():
        lines.append([name, *(f"{found[layer][figure]:.3f}" for figure in ("kl", "iou") for layer in layers)])
    known = f"Size: {size}. Seed: {results['seed']}. Commit: {(results['commit'] or 'unknown')[:10]}."
    made = [*(f"| {' | '.join(row)} |" for row in lines), "", known, "", f"![KL and IOU](results/{size}.png)"]
    put_between(folder / "README.md", "\n".join(made))
