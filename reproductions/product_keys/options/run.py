"""What options that came after the paper are worth: each beside (f), initialised and residual, and (b) without memory.

Gated output, cosines, and one table for both layers are of Memory Layers at Scale (arXiv 2412.09764); queries that are
normalised each by itself are what causal models have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from product_keys.rows import LONGER, MODELS
from tables.harness import Row, Table

RESM = MODELS["(f) + Init + ResM"]
OPTIONS: dict[str, dict[str, Any]] = {
    "gated": {"gated": True},
    "cosine": {"cosine": True},
    "one table for both layers": {"shared": True},
    "all three": {"gated": True, "cosine": True, "shared": True},
    "queries normalised each alone": {"query_norm": "layer"},
}
MEASURED = {
    "WT-2": "test/masked_perplexity",
    "top-1, lower": "test/memory_usage/1/top1_usage",
    "top-1, upper": "test/memory_usage/3/top1_usage",
    "PG-19": "test/masked_perplexity",
}


def rows() -> list[Row]:
    """A row for each model and text."""
    models = {"(b) no memory": LONGER, "(f) + Init + ResM": RESM}
    for label, changes in OPTIONS.items():
        name = f"{RESM.name}-{'-'.join(changes)}"
        models[label] = replace(RESM, name=name, product_keys=RESM.product_keys | changes)
    found = []
    for label, trained in models.items():
        usage = [column for column in MEASURED if "top-1" in column] if trained.product_keys else []
        found.append(Row(label, trained, None, dict.fromkeys(["WT-2", *usage]), "WT-2"))
        found.append(Row(label, trained, None, {"PG-19": None}, "PG-19"))
    return found


TABLE = Table("options", MEASURED, rows())
main, table = TABLE.main, TABLE.table
