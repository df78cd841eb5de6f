"""Table 3: long-term memory where segments are short."""

from tables.harness import Table
from trime.rows import dev_test

TABLE = Table(
    "TRIME, Table 3",
    {"dev": "valid/perplexity", "test": "test/perplexity"},
    [
        dev_test("Transformer", 25.31, 25.87),
        dev_test("+ continuous cache, long-term", 22.95, 23.59),
        dev_test("TRIME", 24.45, 25.60),
        dev_test("TRIME long", 21.76, 22.66),
    ],
    change="test",
)
main, table = TABLE.main, TABLE.table
