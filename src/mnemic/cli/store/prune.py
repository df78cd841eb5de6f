"""Write a smaller store beside a store, without rows that only repeat a near one, and measure what that costs.

The cost is measured on text that the store was not made from: how often the right next token is among the nearest
rows, how often they vote for it, and how often they vote differently than before.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from mnemic.cli.options import add_config_options, given
from mnemic.cli.store.opening import STORE_HELP, add_model, add_store, bytes_in_words, model_of
from mnemic.errors import UsageError

EXAMPLE = """  mnemic store prune python.store smaller.store --closer 0.5
  mnemic store prune python.store smaller.store --held-out notes.txt --split all"""

SHOWN = 5  # documents that are named


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    from mnemic.stores.prune import PruneConfig

    add_store(parser)
    parser.add_argument("smaller", help=f"where the pruned store is written: {STORE_HELP}")
    add_config_options(parser, PruneConfig, "which rows")
    parser.add_argument("--held-out", metavar="CORPUS", help="text to measure on; unset: the store's own corpus")
    parser.add_argument("--split", default="valid", metavar="TEXT", help="the part of it (default: valid)")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help="measure what it costs")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prunes, and prints what it gained and cost."""
    from mnemic.stores import open_store
    from mnemic.stores.build_config import Reading
    from mnemic.stores.config import Origin
    from mnemic.stores.prune import PruneConfig, held_out, prune_store

    config = PruneConfig.from_dict(given(arguments, PruneConfig))
    with open_store(arguments.store) as store:
        sample = None
        if arguments.measure:
            reading = Reading.of(Origin.from_dict(dict(store.config.origin)))
            corpus = arguments.held_out or (reading.corpus if reading else None)
            if not corpus:
                raise UsageError("which text to measure on? give --held-out CORPUS, or --no-measure")
            model, tokenizer = model_of(store, arguments)
            sample = held_out(model, tokenizer, store, corpus, arguments.split)
        pruned = prune_store(store, arguments.smaller, config, sample)
        pruned.store.close()
    print(json.dumps(pruned.report) if arguments.json else in_words(arguments.smaller, pruned.report))
    return 0


def in_words(path: str, report: dict[str, Any]) -> str:
    """The report in sentences."""
    left = report["rows_after"] / report["rows_before"]
    lines = [
        f"{path}: {report['rows_after']:,} of {report['rows_before']:,} rows ({left:.0%}), "
        f"{bytes_in_words(report['bytes_after'])} of {bytes_in_words(report['bytes_before'])}"
    ]
    if len(report["namespaces"]) > 1:
        lines += [
            f"  {name}: {rows['rows_after']:,} of {rows['rows_before']:,} rows"
            for name, rows in report["namespaces"].items()
        ]
    if held := report.get("held_out"):
        if held["left_out"]:
            shown = ", ".join(held["left_out"][:SHOWN]) + ", ..." * (len(held["left_out"]) > SHOWN)
            lines.append(f"not measured on, because the store has it: {shown} ({len(held['left_out']):,})")
        lines += [
            f"measured on {held['contexts']:,} contexts of text that the store does not have, "
            f"{held['k']} nearest rows each:",
            f"  the right token is among them   {held['recall_before']:.1%} -> {held['recall_after']:.1%}",
            f"  and gets the most votes         {held['accuracy_before']:.1%} -> {held['accuracy_after']:.1%}",
            f"  the votes go to another token   {held['changed']:.1%}",
        ]
    return "\n".join(lines)
