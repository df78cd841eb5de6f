"""Read all of a store and compare it with what was written; exit code 3 if anything is damaged."""

from __future__ import annotations

import argparse
import json

from mnemic.cli.store.opening import add_store
from mnemic.errors import DamagedError

EXAMPLE = """  mnemic store verify python.store
  mnemic store verify python.store --json || echo "copy it back from a backup" """


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints what is wrong, or that nothing is."""
    from mnemic.stores import open_store
    from mnemic.train.terminal import progress_bar

    rows = 0
    try:
        with open_store(arguments.store) as store, progress_bar(None, "part") as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            problems, rows = store.verify(progress), len(store)
    except DamagedError as error:  # too damaged to be opened
        problems = [str(error)]
    if arguments.json:
        print(json.dumps({"store": arguments.store, "whole": not problems, "rows": rows, "problems": problems}))
    elif problems:
        print(f"{arguments.store} is damaged:", *problems, sep="\n  ")
    else:
        print(f"{arguments.store} is whole: {rows:,} rows, nothing is damaged")
    return DamagedError.exit_code if problems else 0
