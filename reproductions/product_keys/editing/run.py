"""Editing: a model learns a new text in three ways, and forgets some of what it knew in each."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from tables.harness import machine
from tables.models import alone
from tables.readme import put_between
from tables.settings import identity
from tables.texts import Text
from torch import nn

import mnemic
from mnemic.cli.loading import load_model, new_model, read_new_model
from mnemic.config import Config, option
from mnemic.data import load_tokenizer, train_tokenizer
from mnemic.errors import UsageError
from mnemic.files import new_folder, write_text
from mnemic.train.report import commit, versions
from mnemic.train.terminal import no_other_bars, say

PAPER = {"full": -0.89, "lora": -0.71, "slots": -0.11}  # F1 on NaturalQuestions after 1,000 new facts, by its abstract
CALLED = {"full": "all weights", "lora": "LoRA", "slots": "chosen slots"}


@dataclass(kw_only=True)
class Editing(Config):
    """What is known, what is new, and how it is learned."""

    home: dict[str, Any] = option({}, "the text that the model knows: see Text")
    other: dict[str, Any] = option({}, "the new text")
    model: str = option("preset:small", "as in `mnemic train --model`")
    vocab_size: int = option(2048, "of the BPE tokenizer, which is trained on both texts")
    product_keys: dict[str, Any] = option({}, "its memory: see ProductKeys")
    train: dict[str, Any] = option({}, "how the model learns what it knows: see TrainConfig")
    learn: dict[str, Any] = option({}, "how it learns the new text, but for the learning rate")
    rates: dict[str, list[float]] = option({}, "the learning rates that are tried of each way: full, lora, slots")
    rank: int = option(8, "of LoRA's matrices")
    most: int = option(500, "slots of each table that learn")
    background: int = option(1000, "batches of the known text that tell which slots it reads")
    evaluate: dict[str, Any] = option({}, "how losses are measured: see EvaluateConfig")
    seeds: list[int] = option([0], "seeds of the model")

    def check(self) -> None:
        """Raises an error for what the parts themselves refuse."""
        for config, settings in (
            (Text, self.home),
            (Text, self.other),
            (mnemic.ProductKeys, self.product_keys),
            (mnemic.TrainConfig, self.train),
            (mnemic.TrainConfig, self.learn),
            (mnemic.EvaluateConfig, self.evaluate),
        ):
            config.from_dict(settings)
        if set(self.rates) != set(CALLED):
            raise UsageError(f"rates are of {', '.join(CALLED)}: not of {', '.join(self.rates)}")


def main(folder: Path, size: str, seeds: Sequence[int] | None, runs: Path) -> None:
    """Trains the model, teaches it in each way with each rate, and measures; goes on where it stopped."""
    settings = Editing.load(folder / f"{size}.toml")
    path = folder / "results" / f"{size}.json"
    found: dict[str, Any] = {}
    for seed in settings.seeds if seeds is None else seeds:
        say(f"editing ({size}), seed {seed}")
        found[str(seed)] = Pupil(settings, seed, runs).taught()
        results = {"size": size, "settings": settings.to_dict(), "seeds": found}
        results |= {"commit": commit(), "versions": versions(), "machine": machine()}
        write_text(path, json.dumps(results, indent=2) + "\n")


class Pupil:
    """A model that knows one text, by its settings and seed, in its folder below `runs`."""

    def __init__(self, settings: Editing, seed: int, runs: Path) -> None:
        self.settings, self.seed = settings, seed
        self.home, self.other = Text(**settings.home).open(), Text(**settings.other).open()
        made = [settings.home, settings.other, settings.model, settings.vocab_size, settings.product_keys]
        self.folder = runs / f"editing-{identity(*made, settings.train)}-seed{seed}"

    def taught(self) -> dict[str, Any]:
        """The losses before, those of each way and rate on valid, and on test those of each way's best rate."""
        settings = self.settings
        self.train()
        before = self.kept(["before"], lambda: {"losses": self.losses(*self.load(), ("valid", "test"))})
        trials = []
        for way, rates in settings.rates.items():
            for rate in rates:
                how = [way, rate, settings.learn, settings.evaluate, settings.rank, settings.most, settings.background]
                say(f"{CALLED[way]}, learning rate {rate:g}")
                trials.append(self.kept(how, lambda way=way, rate=rate: self.teach(way, rate)))
        best = {way: min((t for t in trials if t["way"] == way), key=lambda t: t["valid"]["other"]) for way in CALLED}
        return {
            "before": before["losses"],
            "trials": trials,
            "best": {way: trial["rate"] for way, trial in best.items()},
        }

    def train(self) -> None:
        """Trains the model on what it is to know, unless that is done."""
        with alone(self.folder):
            if (self.folder / "model").is_dir():
                return
            tokenizer, settings = self.tokenizer(), self.settings
            torch.manual_seed(self.seed)
            model = new_model(tokenizer, *read_new_model(settings.model))
            mnemic.augment(model, mnemic.ProductKeys(**settings.product_keys))
            how = {**settings.train, "seed": self.seed, "resume": True, "out": str(self.folder)}
            mnemic.train(model, tokenizer, self.home, **how)

    def tokenizer(self) -> Any:
        """The tokenizer of both texts."""
        folder = self.folder / "tokenizer"
        if not folder.is_dir():
            documents = [*self.home.documents("train"), *self.other.documents("train")]
            tokenizer = train_tokenizer(documents, "bpe", self.settings.vocab_size)
            with new_folder(folder) as made:
                tokenizer.save_pretrained(made)
        return load_tokenizer(folder)

    def load(self) -> tuple[Any, Any]:
        """The model that knows the one text, and its tokenizer."""
        with no_other_bars():
            return load_model(str(self.folder))

    def teach(self, way: str, rate: float) -> dict[str, Any]:
        """What came of the new text, learned in one way with one rate."""
        began, (model, tokenizer) = time.monotonic(), self.load()
        numbers = WAYS[way](self, model, tokenizer)
        trainable = "slots" if way == "slots" else "all"
        how = {**self.settings.learn, "learning_rate": rate, "seed": self.seed, "trainable": trainable}
        with tempfile.TemporaryDirectory() as out:
            report = mnemic.train(model, tokenizer, self.other, **how, out=out).report
        losses = self.losses(model, tokenizer, ("valid", "test"))
        found = {"way": way, "rate": rate, "numbers": numbers, "loss": report["losses"][-1]["loss"], **losses}
        return found | {"tokens": report["tokens"], "seconds": time.monotonic() - began}

    def losses(self, model: Any, tokenizer: Any, splits: Sequence[str]) -> dict[str, dict[str, float]]:
        """Nats per token of both texts, by split."""
        found: dict[str, dict[str, float]] = {}
        for split in splits:
            found[split] = {}
            for name, corpus in (("home", self.home), ("other", self.other)):
                result = mnemic.evaluate(model, tokenizer, corpus, **self.settings.evaluate, split=split)
                found[split][name] = result["nll"] / result["tokens"]
        return found

    def kept(self, what: list[Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found with these settings before, or is made now and kept."""
        path = self.folder / "kept" / f"{identity(what, self.settings.evaluate)}.json"
        if not path.exists():
            write_text(path, json.dumps(make(), indent=2) + "\n")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def all_weights(pupil: Pupil, model: Any, tokenizer: Any) -> int:
    """Everything learns; how many numbers that is."""
    return sum(parameter.numel() for parameter in model.parameters())


def lora(pupil: Pupil, model: Any, tokenizer: Any) -> int:
    """Only matrices of low rank beside those of attention and feed-forward learn; how many numbers that is."""
    head = model.get_output_embeddings()
    names = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head and not name.startswith("memory.")
    ]
    rank = pupil.settings.rank
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), model)
    # the adapter is a part of the base from here on: training saves what it has trained
    model.memory.base_names = frozenset(name for name in model.state_dict() if not name.startswith("memory."))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def chosen_slots(pupil: Pupil, model: Any, tokenizer: Any) -> int:
    """Only slots that the new text reads more than the known one learn; how many numbers they hold."""
    how = {"window": pupil.settings.learn["segment_length"], "batches": pupil.settings.background}
    slots = mnemic.choose_slots(model, tokenizer, pupil.other, pupil.home, pupil.settings.most, **how)
    model.memory.product_keys.learn_only(slots)
    tables = model.memory.product_keys.tables.values()
    return sum(int(table.learning.sum()) * table.weight.shape[1] for table in tables)


WAYS = {"full": all_weights, "lora": lora, "slots": chosen_slots}


def table(folder: Path, size: str) -> None:
    """Puts the losses in README.md: those of each way at its best rate on test, and all that were tried on valid."""
    results = json.loads((folder / "results" / f"{size}.json").read_text(encoding="utf-8"))
    seeds = list(results["seeds"].values())

    def average(of: Callable[[dict[str, Any]], float]) -> float:
        return mean(map(of, seeds))

    def trial(found: dict[str, Any], way: str, rate: float) -> dict[str, Any]:
        return next(t for t in found["trials"] if (t["way"], t["rate"]) == (way, rate))

    known = {text: average(lambda found, text=text: found["before"]["test"][text]) for text in ("home", "other")}
    lines = [
        "| what learns | F1 on NaturalQuestions, paper | numbers | new text, test | known text, test | it rose by |",
        "|---|---|---|---|---|---|",
        f"| nothing | – | 0 | {known['other']:.3f} | {known['home']:.3f} | – |",
    ]
    for way, name in CALLED.items():
        best = [trial(found, way, found["best"][way]) for found in seeds]
        new, old = (mean(one["test"][text] for one in best) for text in ("other", "home"))
        numbers = f"{best[0]['numbers']:,}"
        lines.append(f"| {name} | {PAPER[way]:+.0%} | {numbers} | {new:.3f} | {old:.3f} | {old - known['home']:+.3f} |")
    lines += ["", "All rates that were tried, on valid; the best of each way by the new text is that above.", ""]
    lines += ["| what learns | learning rate | new text | known text | it rose by |", "|---|---|---|---|---|"]
    start = average(lambda found: found["before"]["valid"]["home"])
    for way, rates in results["settings"]["rates"].items():
        for rate in rates:
            tried = [trial(found, way, rate)["valid"] for found in seeds]
            new, old = (mean(one[text] for one in tried) for text in ("other", "home"))
            lines.append(f"| {CALLED[way]} | {rate:g} | {new:.3f} | {old:.3f} | {old - start:+.3f} |")
    said = f"Size: {size}. Seeds: {', '.join(results['seeds'])}. Commit: {(results['commit'] or 'unknown')[:10]}."
    put_between(folder / "README.md", "\n".join([*lines, "", said]))
