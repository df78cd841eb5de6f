"""Add one more text to a store: all of it, or nothing if that is interrupted.

The text is read by the model that made the store, in the same way as the store's own. A document that is there already
is refused, unless it is to be replaced.
"""

from __future__ import annotations

import argparse
import json

from mnemic.cli.store.opening import add_model, add_store, counted, model_of, overridden

EXAMPLE = """  mnemic store add python.store notes.txt
  mnemic store add python.store letters/ --namespace alice
  mnemic store add python.store notes.txt --replace"""


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    add_store(parser)
    parser.add_argument("corpus", help="a text file, a folder, a .jsonl file, hf:<dataset>, or a name")
    parser.add_argument("--namespace", default="default", metavar="TEXT", help="whom it belongs to (default: default)")
    parser.add_argument("--split", default="all", metavar="TEXT", help="the part to read (default: all of it)")
    parser.add_argument("--replace", action="store_true", help="put documents in the place of those of the same name")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print what was added as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Adds, and says how much."""
    from mnemic.stores import open_store
    from mnemic.stores.build import add_to_store

    with open_store(arguments.store) as store:
        model, tokenizer = model_of(store, arguments)
        report = add_to_store(
            store,
            model,
            tokenizer,
            arguments.corpus,
            namespace=arguments.namespace,
            split=arguments.split,
            replace=arguments.replace,
            override=overridden(arguments),
        )
    if arguments.json:
        print(json.dumps(report))
    else:
        instead = f" in the place of {report['replaced']:,}" if report["replaced"] else ""
        print(
            f"{report['store']}: {counted(report['added'], 'row')} of {counted(report['documents'], 'document')} "
            f"added{instead}; it has {report['rows']:,} now"
        )
    return 0
