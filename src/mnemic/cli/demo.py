"""Train a small decoder with and without memory on Python's own library, and compare.

Needs no network and no arguments. Every memory is trained from the same weights on the same batches as the model
without one; a further model without memory, from other weights, shows how much chance alone changes. Then the model
without memory is taught new text by a store, without training. The table goes to stdout; the report, one HTML file with
the curves, and the models go to the folder --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemic.cli.options import add_config_options, given
from mnemic.config import Config, option
from mnemic.errors import UsageError

if TYPE_CHECKING:
    from mnemic.analysis.report import Contender

EXAMPLE = """  mnemic demo
  mnemic demo --steps 50 --out /tmp/quick"""

REPORT = "report.html"
BASE, CHANCE = "no memory", "no memory, other start"


@dataclass(kw_only=True)
class DemoConfig(Config):
    """The size of the demo; as it is, it takes about four minutes on two cores."""

    out: str = option("mnemic-demo", "folder of the report and the models; an earlier demo there is replaced")
    corpus: str = option("stdlib", "what to train on: Python's own library, or any corpus that `train` takes")
    characters: int = option(30_000, "of each document only so much, from its beginning, is read")
    steps: int = option(400, "updates of each model")
    batch_size: int = option(8, "rows in a batch")
    segment_length: int = option(128, "tokens in a row")
    layers: int = option(4, "blocks of the decoder")
    width: int = option(128, "width of the decoder")
    vocab_size: int = option(4096, "size of the vocabulary of the BPE tokenizer")
    seed: int = option(0, "of the weights and of the order of documents")

    def check(self) -> None:
        for name in ("characters", "steps", "batch_size", "segment_length", "layers", "width", "vocab_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected 1 or more")


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    add_config_options(parser, DemoConfig, "size")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Trains the contenders one after the other, prints their table and writes the report."""
    config = DemoConfig.from_dict(given(arguments, DemoConfig))
    from mnemic.analysis.report import text_table, write_report
    from mnemic.cli.teaching import teach
    from mnemic.files import new_folder
    from mnemic.train.report import commit, versions

    out, started = Path(config.out), time.monotonic()
    refuse_foreign_folder(out)
    with new_folder(out) as folder:
        contenders, corpus = compete(config, folder)
        say("teaching the model without memory by a store")
        lesson = teach(folder / run_name(BASE), corpus, folder, config.segment_length)
        notes = [*conclusions(contenders), *lesson.sentences()]
        settings = {"demo": config.to_dict(), "versions": versions(), "commit": commit()}
        write_report(folder / REPORT, "mnemic demo: with and without memory", contenders, settings, notes)
        results = {
            "lesson": asdict(lesson),
            "rows": {c.name: c.row for c in contenders},
            "samples": {c.name: c.sample for c in contenders},
        }
        (folder / "results.json").write_text(json.dumps({**settings, **results, "notes": notes}, indent=2))
    if arguments.json:
        print(json.dumps({**results, "notes": notes, "report": str(out / REPORT)}))
    else:
        print(text_table(contenders), "", *notes, "", *samples(contenders), f"report: {out / REPORT}", sep="\n")
    say(f"the demo took {time.monotonic() - started:.0f} s")
    return 0


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def refuse_foreign_folder(out: Path) -> None:
    """UsageError if `out` holds anything but an earlier demo, which may be replaced."""
    if out.is_dir() and any(out.iterdir()) and not (out / REPORT).exists():
        raise UsageError(f"{out} holds something that is not a demo: choose another folder with --out")


def compete(config: DemoConfig, folder: Path) -> tuple[list[Contender], Any]:
    """Trains and evaluates a model without memory, one for each memory there is, and one to show chance; the corpus."""
    from mnemic.data import open_corpus, train_tokenizer
    from mnemic.memories import registry

    corpus = beginnings(open_corpus(config.corpus), config.characters)
    say(f"training a tokenizer of {config.vocab_size} tokens on {corpus.name}")
    tokenizer = train_tokenizer(corpus.documents("train"), kind="bpe", vocab_size=config.vocab_size)
    entrants: list[tuple[str, Any, int]] = [(BASE, None, config.seed)]
    entrants += [(name, registry().load(name).small(layers=config.layers), config.seed) for name in registry()]
    entrants += [(CHANCE, None, config.seed + 1)]
    contenders = []
    for number, (name, memory, seed) in enumerate(entrants, start=1):
        say(f"{number} of {len(entrants)}: {name}")
        contenders.append(contend(config, name, memory, seed, corpus, tokenizer, folder))
    return contenders, corpus


def beginnings(corpus: Any, characters: int) -> Any:
    """The corpus with only the first `characters` of each document."""
    from mnemic.data import Corpus, Document

    def read(split: str) -> Iterator[Any]:
        return (Document(document.id, document.text[:characters]) for document in corpus.documents(split))

    name = f"{corpus.name} (the first {characters:,} characters of each document)"
    return Corpus(name, {split: partial(read, split) for split in corpus.splits})


def run_name(contender: str) -> str:
    """The name of a contender's folder."""
    return contender.replace(", ", "-").replace(" ", "-")


def contend(
    config: DemoConfig, name: str, memory: Any, seed: int, corpus: Any, tokenizer: Any, folder: Path
) -> Contender:
    """Trains and evaluates one model."""
    import torch

    from mnemic.analysis.report import Contender
    from mnemic.augment import augment
    from mnemic.cli.generate import GenerateConfig, write
    from mnemic.cli.loading import new_decoder
    from mnemic.evaluate import evaluate
    from mnemic.train import TrainConfig, train

    torch.manual_seed(seed)
    model = new_decoder(tokenizer, hidden_size=config.width, num_hidden_layers=config.layers)
    if memory is not None:
        augment(model, memory)
    settings = TrainConfig(
        steps=config.steps,
        batch_size=config.batch_size,
        segment_length=config.segment_length,
        learning_rate=2e-3,
        warmup=max(1, config.steps // 10),
        log_every=max(1, config.steps // 200),
        seed=config.seed,
        out=str(folder / run_name(name)),
    )
    trained = train(model, tokenizer, corpus, settings)
    result = evaluate(model, tokenizer, corpus, split="valid", window=config.segment_length)
    row: dict[str, float | int] = {
        "perplexity/token": result["perplexity"],
        "perplexity/byte": result["byte_perplexity"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens/s": int(trained.report["tokens_per_second"]),
    }
    sample = write(model, tokenizer, "import ", GenerateConfig(max_new_tokens=40, seed=config.seed))
    return Contender(name, row, trained.losses, "import " + sample)


def conclusions(contenders: list[Contender]) -> list[str]:
    """What the figures say and what they do not say, in sentences."""
    measure = "perplexity/token"
    by_name = {contender.name: contender.row[measure] for contender in contenders}
    base, spread = by_name[BASE], abs(by_name[CHANCE] - by_name[BASE])
    notes = [
        f"Two models without memory that differ in their first weights only are {spread:.2f} apart in perplexity. "
        "A difference below that means nothing, and after a run this short one above it means little."
    ]
    for name, value in by_name.items():
        if name not in (BASE, CHANCE):
            side = "lower" if value < base else "higher"
            verdict = "more than" if abs(value - base) > spread else "no more than"
            notes.append(
                f"{name}: {abs(value - base):.2f} {side} than without memory, {verdict} chance alone did here."
            )
    return notes


def samples(contenders: list[Contender]) -> list[str]:
    """A line that each contender wrote."""
    return [f"{c.name} writes: {' '.join(c.sample.split())[:100]}" for c in contenders if c.name != CHANCE]
