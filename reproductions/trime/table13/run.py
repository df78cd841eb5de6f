"""Table 13: how often the right word is among the nearest rows of the store."""

from tables.harness import Table
from trime.rows import row

DEPTHS = (1, 8, 64, 1024)
PAPER = {"kNN-LM": (25.82, 50.03, 69.85, 86.97), "TRIME ext": (27.64, 51.16, 70.43, 87.18)}

TABLE = Table(
    "TRIME, Table 13",
    {f"top {depth}": f"valid/retrieval_accuracy/{depth}" for depth in DEPTHS},
    [
        row(label, {f"top {depth}": figure for depth, figure in zip(DEPTHS, figures, strict=True)})
        for label, figures in PAPER.items()
    ],
    scale=100,
)
main, table = TABLE.main, TABLE.table
