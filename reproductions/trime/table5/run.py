"""Table 5: another domain, with a store of the home text or of the other one."""

from tables.harness import Row, Table, Testing
from tables.models import EXT, PLAIN
from trime.rows import dev_test

CACHE_AND_HOME, CACHE_AND_OTHER = (Testing(long=1, store=text, joint=False) for text in ("home", "other"))
TRIME_HOME, TRIME_OTHER = (Testing(long=1, store=text) for text in ("home", "other"))

TABLE = Table(
    "TRIME, Table 5",
    {"dev": "valid/perplexity", "test": "test/perplexity"},
    [
        dev_test("Transformer", 62.72, 53.98),
        dev_test("TRIME", 59.39, 49.25),
        dev_test("TRIME long", 49.21, 39.50),
        Row("kNN-LM + continuous cache, store of home", PLAIN, CACHE_AND_HOME, {"dev": 53.27, "test": 43.24}),
        Row("TRIME ext, store of home", EXT, TRIME_HOME, {"dev": 47.00, "test": 37.70}),
        Row("kNN-LM + continuous cache, store of the other", PLAIN, CACHE_AND_OTHER, {"dev": 42.12, "test": 32.87}),
        Row("TRIME ext, store of the other", EXT, TRIME_OTHER, {"dev": 36.97, "test": 27.84}),
    ],
    change="test",
)
main, table = TABLE.main, TABLE.table
