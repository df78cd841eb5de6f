"""Table 5: a trained model goes on with a larger memory (arXiv)."""

from memorizing.rows import memorizing
from tables.harness import Row, Table

TRAINED, LARGE = memorizing("8192"), memorizing("65K")


def row(label: str, trained: object, variant: str, perplexity: float) -> Row:
    """A row of the table."""
    return Row(label, trained, None, {"perplexity": perplexity}, variant)  # type: ignore[arg-type]


TABLE = Table(
    "Memorizing Transformers, Table 5",
    {"perplexity": "test/perplexity"},
    [
        row("512, 8192", TRAINED, "arXiv+xl", 2.37),
        row("512, 65K", LARGE, "arXiv+xl", 2.31),
        row("512, 8192, then 65K", memorizing("65K", TRAINED), "arXiv+xl", 2.32),
        row("512, 8192, then 131K", memorizing("131K", TRAINED), "arXiv+xl", 2.30),
        row("512, 8192, then 262K", memorizing("262K", TRAINED), "arXiv+xl", 2.26),
        row("2048, 8192", TRAINED, "arXiv+2048+2048-xl", 2.33),
        row("2048, 65K", LARGE, "arXiv+2048+2048-xl", 2.26),
        row("2048, 65K, then 131K", memorizing("131K", LARGE), "arXiv+2048+2048-xl", 2.23),
        row("2048, 65K, then 262K", memorizing("262K", LARGE), "arXiv+2048+2048-xl", 2.21),
    ],
    change="perplexity",
)
main, table = TABLE.main, TABLE.table
