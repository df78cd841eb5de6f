"""Show what a store holds: counts, sizes, namespaces, what made it, its index and the recall measured of it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from mnemic.cli.store.opening import add_store, bytes_in_words, counted, printable

if TYPE_CHECKING:
    from mnemic.stores.base import Summary

EXAMPLE = """  mnemic store info python.store
  mnemic store info python.store --json"""

SHOWN = 12  # namespaces


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options."""
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the summary."""
    from mnemic.stores import open_store

    with open_store(arguments.store) as store:
        summary = store.summary()
    if arguments.json:
        print(json.dumps(as_dict(summary), indent=2))
    else:
        facts = in_words(summary)
        width = max(map(len, facts))
        print("\n".join(f"{name:{width}}  {printable(value)}" for name, value in facts.items()))
    return 0


def as_dict(summary: Summary) -> dict[str, Any]:
    """The summary as plain values; what was read, which the origin keeps as one text, in its parts."""
    from mnemic.stores.build_config import Reading
    from mnemic.stores.config import Origin

    config = {name: value for name, value in summary.config.to_dict().items() if name != "schema"}
    origin = dict(config.pop("origin"))
    if reading := Reading.of(Origin.from_dict(origin)):
        origin["corpus"] = {name: value for name, value in reading.to_dict().items() if name != "schema"}
    facts = {name: getattr(summary, name) for name in ("address", "version", "rows", "documents", "bytes")}
    return {**facts, "namespaces": summary.namespaces, "config": config, "origin": origin, "index": summary.index}


def in_words(summary: Summary) -> dict[str, str]:
    """The summary, a line for each thing."""
    config, index = summary.config, summary.index
    each = f" ({summary.bytes / summary.rows:.0f} bytes a row)" if summary.rows else ""
    recall = f", measured recall at 32: {index['recall']:.3f}" if "recall" in index else ""
    facts = {
        "store": f"{summary.address}, version {summary.version}",
        "rows": f"{summary.rows:,} of {counted(summary.documents, 'document')}",
        "size": f"{bytes_in_words(summary.bytes)}{each}" if summary.bytes else "unknown: the server does not say",
        "keys": f"{config.dim} numbers as {config.keys}, nearest by {METRICS[config.metric]}",
        "index": f"{index.get('kind', 'none')}{recall}, asked for: {config.recall:g}",
    }
    return facts | {"namespaces": namespaces_in_words(summary.namespaces)} | origin_in_words(summary)


METRICS = {"l2": "squared distance (l2)", "ip": "inner product (ip)", "cosine": "cosine"}


def namespaces_in_words(namespaces: dict[str, int]) -> str:
    """The largest namespaces and their rows."""
    largest = sorted(namespaces.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name} {count:,}" for name, count in largest[:SHOWN])
    return (shown or "none") + (f" and {len(largest) - SHOWN:,} more" if len(largest) > SHOWN else "")


def origin_in_words(summary: Summary) -> dict[str, str]:
    """What made the rows."""
    origin = as_dict(summary)["origin"]
    facts = {}
    for what in ("model", "tokenizer"):
        if fingerprint := origin.get(f"{what}_fingerprint"):
            facts[what] = f"{origin.get(what) or '(no name)'}, fingerprint {fingerprint[:12]}"
    if origin.get("layer"):
        facts["key"] = f"input of {origin['layer']}"
    text = origin.get("corpus")
    if isinstance(text, dict):
        facts["text"] = f"{text['corpus']}, split {text['split']}"
        facts["read"] = f"{text['window']} tokens at once, at least {text['min_context']} before each"
        if text["max_probability"] < 1:
            facts["left out"] = f"tokens that the model gave a probability above {text['max_probability']:g}"
    elif text:
        facts["text"] = text
    return facts
