"""Say what a store of a given size takes here: disk, memory, time to build and to search, by kind of index."""

from __future__ import annotations

import argparse
import json

from mnemic.cli.store.opening import bytes_in_words
from mnemic.errors import UsageError

EXAMPLE = """  mnemic store plan --rows 1e7 --dim 768
  mnemic store plan --rows 1e9 --dim 1024 --json"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    parser.add_argument("--rows", metavar="N", required=True, help="rows, one for each token of the text; 1e9 will do")
    parser.add_argument("--dim", metavar="N", type=int, required=True, help="numbers in a key: the model's hidden size")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measures this machine for a few seconds and prints a line for each kind of index."""
    import dataclasses
    import sys

    from mnemic.stores.plan import CODES, best, checked, measure, plan, widest_of_milvus

    try:
        rows = float(arguments.rows)
    except ValueError:
        raise UsageError(f"--rows {arguments.rows}: expected a number, as 5000000 or 1e9") from None
    checked(rows, arguments.dim)
    print("measuring this machine ...", file=sys.stderr)
    rates = measure(arguments.dim)
    plans = plan(rows, arguments.dim, rates)
    chosen = best(plans)
    if arguments.json:
        every = list(map(dataclasses.asdict, plans))
        kind = chosen.kind if chosen else None
        print(json.dumps({"rates": dataclasses.asdict(rates), "plans": every, "best": kind}, indent=2))
        return 0
    head = ("kind", "index", "recall", "disk", "memory", "build", "search", "", "")
    lines = [head]
    for one in plans:
        sizes = (bytes_in_words(int(one.disk)), bytes_in_words(int(one.memory)))
        mark = " <- best" if one is chosen else ""
        times = (seconds(one.build), seconds(one.search))
        setting = one.setting or "what a store chooses by itself"
        lines.append((one.kind, one.index, one.recall, *sizes, *times, setting, one.verdict + mark))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    print(
        "build: without making the keys; search: one query, 32 results; recall: the share of the true 32 that is found"
    )
    if any(one.kind == CODES for one in plans):
        print(
            f"{CODES}: without keys there is no second look, so the recall is what the store measures, typically far "
            "below the dial: take them only where the keys do not fit"
        )
    if chosen is None:
        print(f"nothing fits, and Milvus takes keys of up to {widest_of_milvus()} numbers: choose a narrower layer")
    return 0


def seconds(time: float) -> str:
    """A time in the unit that suits it."""
    for size, unit in ((31_557_600, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if time >= size:
            return f"{time / size:.1f} {unit}"
    return f"{time * 1e6:.0f} us"
