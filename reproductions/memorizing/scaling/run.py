"""The scaling figure: a memory of 8K in models of three sizes."""

from memorizing.rows import PLAIN, memorizing
from tables.harness import Row, Table

MEMORY = memorizing("8192")

TABLE = Table(
    "Memorizing Transformers, sizes",
    {"perplexity": "test/perplexity"},
    [
        Row(
            f"{size}, {'memory of 8192' if trained is MEMORY else 'no memory'}",
            trained,
            None,
            {"perplexity": None},
            size,
        )
        for size in ("200M", "1B", "8B")
        for trained in (PLAIN, MEMORY)
    ],
)
main, table = TABLE.main, TABLE.table
