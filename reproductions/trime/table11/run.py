"""Table 11: what similar batches and the gradient into the memory are worth."""

from tables.harness import TRIME_EXT, Row, Table
from tables.models import EXT

TABLE = Table(
    "TRIME, Table 11",
    {"dev": "valid/perplexity"},
    [
        Row("TRIME ext", EXT, TRIME_EXT, {"dev": 41.50}),
        Row("without BM25 batches", EXT.changed(batching="shuffled"), TRIME_EXT, {"dev": 45.71}),
        Row("without gradient into the memory", EXT.changed(memory_gradient=False), TRIME_EXT, {"dev": 45.15}),
    ],
    change="dev",
)
main, table = TABLE.main, TABLE.table
