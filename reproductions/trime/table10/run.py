"""Table 10: all methods on a small model."""

from tables.harness import Table
from trime.rows import dev_test

TABLE = Table(
    "TRIME, Table 10",
    {"dev": "valid/perplexity", "test": "test/perplexity"},
    [
        dev_test("Transformer", 82.68, 83.66),
        dev_test("+ continuous cache", 67.45, 68.08),
        dev_test("+ continuous cache, long-term"),
        dev_test("kNN-LM", 51.88, 52.24),
        dev_test("kNN-LM + continuous cache", 45.15, 45.82),
        dev_test("kNN-LM + continuous cache, long-term"),
        dev_test("TRIME", 54.78, 54.69),
        dev_test("TRIME long", 60.71, 60.10),
        dev_test("TRIME ext, without long"),
        dev_test("TRIME ext", 41.50, 42.36),
    ],
    change="test",
)
main, table = TABLE.main, TABLE.table
