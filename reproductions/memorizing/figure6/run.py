"""Figure 6: a trained model without memory learns to use one; and so do other architectures."""

from memorizing.rows import PLAIN, memorizing
from tables.harness import Row, Table
from tables.models import Trained

AFTERWARDS = memorizing("65K", PLAIN, mix="tanh", normalise="memory")
SEVERAL = memorizing("65K", PLAIN, mix="tanh", normalise="memory", layers=[9, 12, 15, 18, 21], scale=15.0)
LONGER = Trained("plain-longer", "documents", start=PLAIN)

SMOLLM2 = "SmolLM2-135M"
NOTHING = {"perplexity": None}


def of(architecture: str) -> list[Row]:
    """The rows of another architecture, trained here first: it goes on with and without a memory."""
    more = f"{architecture}+20%"
    return [
        Row(architecture, PLAIN, None, NOTHING, architecture, architecture),
        Row(f"{architecture}, 20% of the steps more", LONGER, None, NOTHING, more, architecture),
        Row(f"{architecture}, memory given, 20% of the steps more", AFTERWARDS, None, NOTHING, more, architecture),
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
        Row(SMOLLM2, PLAIN, None, NOTHING, SMOLLM2, SMOLLM2),
        Row(f"{SMOLLM2}, memories given, their gates trained", SEVERAL, None, NOTHING, SMOLLM2, SMOLLM2),
        *of("GPT-2"),
    ],
    change="perplexity",
)
main, table = TABLE.main, TABLE.table
