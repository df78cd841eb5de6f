"""Figure 6: a trained model without memory learns to use one; and so do other architectures."""

from memorizing.rows import PLAIN, memorizing
from tables.harness import Row, Table
from tables.models import Trained

AFTERWARDS = memorizing("65K", PLAIN, mix="tanh", normalise="memory")
LONGER = Trained("plain-longer", "documents", start=PLAIN)

NOTHING = {"perplexity": None}


def of(architecture: str) -> list[Row]:
    """The rows of another architecture, trained here first: it goes on with and without a memory."""
    return [
        Row(f"{architecture}", PLAIN, None, NOTHING, architecture),
        Row(f"{architecture}, 20% of the steps more", LONGER, None, NOTHING, f"{architecture}+20%"),
        Row(f"{architecture}, memory given, 20% of the steps more", AFTERWARDS, None, NOTHING, f"{architecture}+20%"),
    ]


TABLE = Table(
    "Memorizing Transformers, Figure 6",
    {"perplexity": "test/perplexity"},
    [
        Row("Transformer", PLAIN, None, NOTHING),
        Row("Memorizing Transformer", memorizing("65K"), None, NOTHING),
        Row("Transformer, 4% of the steps more", LONGER, None, NOTHING, "4%"),
        Row("memory given, 4% of the steps more", AFTERWARDS, None, NOTHING, "4%"),
        Row("Transformer, 20% of the steps more", LONGER, None, NOTHING, "20%"),
        Row("memory given, 20% of the steps more", AFTERWARDS, None, NOTHING, "20%"),
        *of("Llama"),
        *of("GPT-2"),
    ],
    change="perplexity",
)
main, table = TABLE.main, TABLE.table
