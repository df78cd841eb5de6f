"""Table 14: perplexity by how often a word occurs."""

from tables.harness import Table
from trime.rows import row

BUCKETS = (">10k", "1k-10k", "100-1k", "10-100", "<=10")
COLUMNS = {bucket: f"valid/frequency_buckets/{bucket}/perplexity" for bucket in BUCKETS} | {"all": "valid/perplexity"}
PAPER = {
    "Transformer": (3.35, 4.11, 13.63, 30.46, 240.39, 18.04),
    "kNN-LM + continuous cache": (3.14, 3.85, 12.92, 26.90, 196.03, 16.23),
    "TRIME": (3.47, 4.15, 13.57, 28.05, 198.33, 17.10),
    "TRIME long": (3.43, 4.13, 13.62, 27.89, 194.89, 17.01),
    "TRIME ext": (3.15, 3.84, 12.50, 25.41, 171.61, 15.51),
}

TABLE = Table(
    "TRIME, Table 14",
    COLUMNS,
    [row(label, dict(zip(COLUMNS, figures, strict=True))) for label, figures in PAPER.items()],
)
main, table = TABLE.main, TABLE.table
