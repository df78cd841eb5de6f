"""Table 1: parameters and inference speed of BERT, with PKM and with ResM; one row of tokens, for classification."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables.harness import machine
from tables.readme import put_between
from transformers import BertForPreTraining, BertForSequenceClassification

import mnemic
from mnemic.config import Config, option
from mnemic.files import write_text
from mnemic.models.presets import preset
from mnemic.train.report import commit, versions
from mnemic.train.terminal import say

PAPER = {  # millions of parameters, batches a second on a V100
    "BERT-base": (110, 79.8),
    "BERT-base + PKM": (506, 61.4),
    "BERT-base + ResM": (515, 59.3),
    "BERT-large": (340, 43.1),
    "BERT-large + PKM": (860, 37.2),
    "BERT-large + ResM": (876, 36.1),
}
KINDS = {"PKM": "replace", "ResM": "keep"}


@dataclass(kw_only=True)
class Settings(Config):
    """How large the models are, and how often they run."""

    length: int = option(128, "tokens of the row")
    times: int = option(10, "forwards in each turn")
    turns: int = option(4, "turns that the models take")
    model: dict[str, Any] = option({}, "settings of BERT that differ")
    memory: dict[str, Any] = option({}, "settings of the memory that differ")


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Counts the parameters of each model, and runs all in turns."""
    settings = Settings.load(folder / f"{size}.toml")
    torch.manual_seed(0)
    parameters = {name: counted(built(name, settings, BertForPreTraining)) for name in PAPER}
    models = {name: built(name, settings, BertForSequenceClassification).eval() for name in PAPER}
    ids = torch.randint(1000, (1, settings.length))
    seconds: dict[str, list[float]] = {name: [] for name in PAPER}
    for turn in range(settings.turns):
        for name, model in models.items():
            say(f"Table 1 ({size}), turn {turn + 1}: {name}")
            with torch.inference_mode():
                model(input_ids=ids)
                for _ in range(settings.times):
                    began = time.perf_counter()
                    model(input_ids=ids)
                    seconds[name].append(time.perf_counter() - began)
    results = {"size": size, "settings": settings.to_dict(), "seconds": seconds, "parameters": parameters}
    results |= {"threads": torch.get_num_threads(), "commit": commit(), "versions": versions(), "machine": machine()}
    write_text(folder / "results" / f"{size}.json", json.dumps(results, indent=2) + "\n")


def built(name: str, settings: Settings, kind: Any) -> Any:
    """A model by its name in the table, with random weights."""
    base, _, memory = name.partition(" + ")
    model = kind(preset(base.lower(), **settings.model))
    if memory:
        mnemic.augment(model, mnemic.ProductKeys(feed_forward=KINDS[memory], **settings.memory))
    return model


def counted(model: Any) -> int:
    """The numbers that a model computes with."""
    own = model.memory.count_parameters() if hasattr(model, "memory") else None
    return own or sum(parameter.numel() for parameter in model.parameters())


def table(folder: Path, size: str) -> None:
    """Puts the figures in README.md."""
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    speed = {name: 1 / min(found) for name, found in results["seconds"].items()}
    head = ["model", "parameters, paper", "ours", "batches/s, paper", "of BERT's", "batches/s, ours", "of BERT's"]
    lines = [head, ["---"] * len(head)]
    for name, (millions, batches) in PAPER.items():
        base = name.partition(" + ")[0]
        counted_now, batches_now = results["parameters"][name] / 1e6, speed[name]
        row = [name, f"{millions}M", f"{counted_now:.1f}M", f"{batches:.1f}", f"{batches / PAPER[base][1]:.2f}"]
        lines.append([*row, f"{batches_now:.2f}", f"{batches_now / speed[base]:.2f}"])
    times = results["settings"]["times"] * results["settings"]["turns"]
    known = f"Size: {size}. Commit: {(results['commit'] or 'unknown')[:10]}. Fastest of {times} forwards, in turns; "
    known += f"{results['threads']} threads."
    put_between(folder / "README.md", "\n".join([*(f"| {' | '.join(row)} |" for row in lines), "", known]))
