"""Table 2: memory lesions, BLEU with another number of memory tokens than a model was trained with."""

from __future__ import annotations

from memory_transformer.rows import memory
from tables.harness import Row, Table

SIZES = (0, 2, 5, 10, 20, 30)
PAPER = {10: (11.75, 15.91, 18.22, 25.07, 12.39, 7.87), 20: (3.87, 8.58, 9.75, 14.51, 25.58, 7.51)}

TABLE = Table(
    "Memory Transformer, Table 2",
    {f"{size}": "test/bleu" for size in SIZES},
    [
        Row(f"MemTransformer {trained}", memory(trained), None, {f"{size}": bleu}, count=size)
        for trained, figures in PAPER.items()
        for size, bleu in zip(SIZES, figures, strict=True)
    ],
)
main, table = TABLE.main, TABLE.table
