"""Table 2: all methods on a large model, and how fast they are tested."""

from tables.harness import Table
from trime.rows import dev_test

TABLE = Table(
    "TRIME, Table 2",
    {"dev": "valid/perplexity", "test": "test/perplexity", "tokens/s": "test/tokens_per_second"},
    [
        dev_test("Transformer", 18.04, 18.70, **{"tokens/s": 3600}),
        dev_test("+ continuous cache", 17.65, 18.26, **{"tokens/s": 3600}),
        dev_test("TRIME", 17.10, 17.76, **{"tokens/s": 3600}),
        dev_test("TRIME long", 17.01, 17.64, **{"tokens/s": 3600}),
        dev_test("kNN-LM", 16.40, 16.37, **{"tokens/s": 300}),
        dev_test("kNN-LM + continuous cache", 16.23, 16.23, **{"tokens/s": 300}),
        dev_test("TRIME ext, without long", 15.62, 15.55, **{"tokens/s": 300}),
        dev_test("TRIME ext", 15.51, 15.41, **{"tokens/s": 300}),
    ],
    change="test",
)
main, table = TABLE.main, TABLE.table
