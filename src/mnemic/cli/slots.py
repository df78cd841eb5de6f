"""Show the slots of product keys that a text reads most, and at which tokens; or drop those it does not read.

With --prune a smaller model is written, and what it costs is measured on a part of the corpus that was not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemic.analysis.config import PruneSlotsConfig
from mnemic.cli.options import add_config_options, given
from mnemic.cli.store.opening import bytes_in_words
from mnemic.errors import UsageError

if TYPE_CHECKING:
    from mnemic.analysis.slots import SlotUse

EXAMPLE = """  mnemic slots runs/a notes.txt --most 10
  mnemic slots runs/a books/ --prune smaller
  mnemic slots runs/a books/ --prune smaller --weight 0.99 --held-out test"""
LISTING = ("split", "window", "batch_size", "max_tokens")  # options that say what is read without --prune too


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("model", help="the folder of a run or of a saved model with product keys")
    parser.add_argument("corpus", help="a text file, a folder, a .jsonl file, hf:<dataset>, or a name")
    parser.add_argument("--most", type=int, default=20, help="how many slots are shown, of all that is read (20)")
    parser.add_argument(
        "--prune", metavar="FOLDER", help="write the model without the slots that the corpus does not read"
    )
    add_config_options(parser, PruneSlotsConfig, "which slots are dropped, and on what text")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the slots that the text reads most, or what pruning gained and cost."""
    typed = given(arguments, PruneSlotsConfig)
    config = PruneSlotsConfig.from_dict(typed)
    if arguments.most < 1:
        raise UsageError(f"--most {arguments.most}: expected 1 or more")
    if arguments.prune and Path(arguments.prune).exists():
        raise UsageError(f"{arguments.prune} exists already: choose a new folder")
    if not arguments.prune and (idle := [name for name in typed if name not in LISTING]):
        raise UsageError(f"--{idle[0].replace('_', '-')} says which slots are dropped: give --prune FOLDER too")
    from mnemic.analysis.pruning import prune_slots
    from mnemic.analysis.slots import find_slots
    from mnemic.cli.loading import load_model
    from mnemic.data import open_corpus

    corpus = open_corpus(arguments.corpus)
    model, tokenizer = load_model(arguments.model)
    if arguments.prune:
        report = prune_slots(model, tokenizer, corpus, config)
        model.save_pretrained(arguments.prune)
        tokenizer.save_pretrained(arguments.prune)
        print(json.dumps(report) if arguments.json else in_words(arguments.prune, report))
        return 0
    how = {name: typed[name] for name in LISTING if name in typed}
    found = find_slots(model, tokenizer, corpus, arguments.most, **how)
    print(json.dumps([dataclasses.asdict(slot) for slot in found]) if arguments.json else in_rows(found))
    return 0


def in_rows(found: list[SlotUse]) -> str:
    """A line for each slot."""
    rows = [("layer", "slot", "reads", "weight", "read most at")]
    for slot in found:
        tokens = "  ".join(f"{_quoted(text)} {reads:,}" for text, reads in slot.tokens)
        rows.append((str(slot.layer), f"{slot.slot:,}", f"{slot.reads:,}", f"{slot.weight:,.2f}", tokens))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*(f"{text:>{width}}" for text, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    )


def in_words(folder: str, report: dict[str, Any]) -> str:
    """The report in sentences."""
    left = report["slots_after"] / report["slots_before"]
    lines = [
        f"{folder}: {report['slots_after']:,} of {report['slots_before']:,} slots ({left:.1%}), "
        f"{bytes_in_words(report['bytes_after'])} of {bytes_in_words(report['bytes_before'])}"
    ]
    if len(report["tables"]) > 1:
        lines += [
            f"  layer {name}: {count['after']:,} of {count['before']:,} slots"
            for name, count in report["tables"].items()
        ]
    if report["loss_after"] is not None:
        lines.append(
            f"loss on {report['held_out']}, nats per token: {report['loss_before']:.4f} -> {report['loss_after']:.4f}"
        )
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
