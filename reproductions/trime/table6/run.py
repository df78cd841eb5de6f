"""Table 6: translation."""

from tables.harness import KNN, Row, Table, Testing
from tables.models import EXT, PLAIN

WITHOUT_LOCAL = EXT.changed(local=False, local_dropout=1.0)

TABLE = Table(
    "TRIME, Table 6",
    {"BLEU": "test/bleu"},
    [
        Row("Transformer", PLAIN.changed(batching="documents"), None, {"BLEU": 32.58}),
        Row("kNN-MT", PLAIN.changed(batching="documents"), KNN, {"BLEU": 33.15}),
        Row("TRIME-MT ext", WITHOUT_LOCAL, Testing(local=False, store="home"), {"BLEU": 33.73}),
    ],
    change="BLEU",
)
main, table = TABLE.main, TABLE.table
