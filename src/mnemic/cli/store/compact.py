"""Rewrite a store without forgotten rows and older versions; afterwards nothing of them is in any file."""

from __future__ import annotations

import argparse
import json

from mnemic.cli.store.opening import add_store, bytes_in_words

EXAMPLE = """  mnemic store compact python.store
  mnemic store compact python.store --rebuild       makes a damaged index anew from the rows"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    add_store(parser)
    parser.add_argument("--rebuild", action="store_true", help="make the index anew as well")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Compacts, and says what that gained."""
    from mnemic.stores import open_store
    from mnemic.train.terminal import progress_bar

    with open_store(arguments.store) as store, progress_bar(None, "row") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        before = store.summary().bytes
        version = store.compact(progress, arguments.rebuild)
        after = store.summary()
    if arguments.json:
        report = {"store": arguments.store, "version": version, "rows": after.rows}
        print(json.dumps({**report, "bytes_before": before, "bytes_after": after.bytes}))
    else:
        print(
            f"{arguments.store}: {after.rows:,} rows, {bytes_in_words(after.bytes)} (before: {bytes_in_words(before)})"
        )
    return 0
