"""Table 12: local memory with segments of different length."""

from tables.harness import Table
from trime.rows import row

LENGTHS = {"long segments": "", "middle": "middle", "short": "short"}  # 3072, 512 and 150 in the paper
PAPER = {
    "Transformer": (82.70, 81.15, 81.40),
    "+ continuous cache": (67.45, 71.29, 75.10),
    "TRIME": (54.89, 63.22, 71.82),
}

TABLE = Table(
    "TRIME, Table 12",
    dict.fromkeys(LENGTHS, "valid/perplexity"),
    [
        row(label, {length: figure}, variant)
        for label, figures in PAPER.items()
        for (length, variant), figure in zip(LENGTHS.items(), figures, strict=True)
    ],
)
main, table = TABLE.main, TABLE.table
