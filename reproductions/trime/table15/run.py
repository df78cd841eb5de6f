"""Table 15: how often training goes without local memory (p)."""

from tables.harness import TRIME_EXT, Row, Table
from tables.models import EXT

PAPER = {0.0: 54.33, 0.1: 49.85, 0.5: 45.08, 0.9: 41.50, 1.0: 41.86}

TABLE = Table(
    "TRIME, Table 15",
    {"dev": "valid/perplexity"},
    [Row(f"p = {p}", EXT.changed(local_dropout=p), TRIME_EXT, {"dev": figure}) for p, figure in PAPER.items()],
    change="dev",
)
main, table = TABLE.main, TABLE.table
