"""Table 4: long-term memory for bytes, and for SRU++."""

from tables.harness import TRIME_LONG, Row, Table
from tables.models import PLAIN, PREVIOUS
from trime.rows import dev_test

TABLE = Table(
    "TRIME, Table 4",
    {"dev": "valid/bits_per_byte", "test": "test/bits_per_byte"},
    [
        dev_test("Transformer", 1.18, 1.16),
        dev_test("+ continuous cache, long-term", 1.16, 1.17),
        dev_test("TRIME", 1.14, 1.12),
        dev_test("TRIME long", 1.08, 1.05),
        Row("SRU++", PLAIN, None, {"dev": 1.05, "test": 1.03}, "sru"),
        Row("SRU++, TRIME long", PREVIOUS, TRIME_LONG, {"dev": 1.03, "test": 1.01}, "sru"),
        Row("SRU++, longer segments", PLAIN, None, {"dev": 1.02, "test": 0.99}, "sru-longer"),
        Row("SRU++, longer segments, TRIME long", PREVIOUS, TRIME_LONG, {"dev": 1.00, "test": 0.98}, "sru-longer"),
    ],
    change="test",
)
main, table = TABLE.main, TABLE.table
