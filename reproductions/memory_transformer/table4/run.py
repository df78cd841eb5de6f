"""Table 4: Transformer-XL as a language model, with memory tokens at fixed and at relative positions."""

from __future__ import annotations

from tables.harness import Row, Table
from tables.models import Trained

PLAIN = Trained("xl", batching="documents")
FIXED = Trained("xl-fixed", batching="documents", tokens={"count": 20, "positions": "fixed"})
RELATIVE = Trained("xl-relative", batching="documents", tokens={"count": 20})
PAPER = {"Transformer-XL": (PLAIN, 24.09), "+ 20 mem, fixed": (FIXED, 24.02), "+ 20 mem, relative": (RELATIVE, 23.95)}

TABLE = Table(
    "Memory Transformer, Table 4",
    {"perplexity": "test/perplexity"},
    [Row(label, trained, None, {"perplexity": figure}) for label, (trained, figure) in PAPER.items()],
    change="perplexity",
)
main, table = TABLE.main, TABLE.table
