"""Remove a namespace or a document from a store.

From then on no search finds it. Its bytes are gone from the files, and from older versions, only after
`mnemic store compact`, or at once with --compact. A document that is named without a namespace is removed from every
namespace that has one of that name.
"""

from __future__ import annotations

import argparse
import json

from mnemic.cli.store.opening import add_store, counted, printable
from mnemic.errors import MnemicError, UsageError

EXAMPLE = """  mnemic store forget python.store --namespace alice
  mnemic store forget python.store --namespace alice --document letters/1.txt --compact"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    add_store(parser)
    parser.add_argument("--namespace", action="append", metavar="TEXT", help="whose rows; may be given several times")
    parser.add_argument(
        "--document",
        action="append",
        metavar="NAME",
        help="of which document, in any namespace if none is given; may be given again",
    )
    parser.add_argument("--compact", action="store_true", help="remove the last traces at once")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Forgets, and says how many rows."""
    from mnemic.stores import Where, open_store
    from mnemic.stores.progress import Progress

    if not arguments.namespace and not arguments.document:
        raise UsageError("nothing to forget was named: give --namespace, --document or both")
    chosen = (None if names is None else frozenset(names) for names in (arguments.namespace, arguments.document))
    with open_store(arguments.store) as store:
        forgotten = store.delete(Where(*chosen))
        Progress(store).settle(store)
        store.commit()
        if arguments.compact:
            store.compact()
        left, namespaces = len(store), ", ".join(map(printable, store.summary().namespaces))
    if not forgotten:
        raise MnemicError(f"no row of {arguments.store} is of that name: its namespaces are {namespaces or '(none)'}")
    if arguments.json:
        report = {"store": arguments.store, "forgotten": forgotten, "rows": left, "compacted": arguments.compact}
        print(json.dumps(report))
        return 0
    print(f"{arguments.store}: {counted(forgotten, 'row')} forgotten, {left:,} left")
    if not arguments.compact:
        print(f"their bytes are still in its files: remove them with `mnemic store compact {arguments.store}`")
    return 0
