"""Figure 6: a trained model without memory learns to use one."""

from memorizing.rows import PLAIN, memorizing
from tables.harness import Row, Table
from tables.models import Trained

AFTERWARDS = memorizing("65K", PLAIN, mix="tanh", normalise="memory")
LONGER = Trained("plain-longer", "documents", start=PLAIN)

TABLE = Table(
    "Memorizing Transformers, Figure 6",
    {"perplexity": "test/perplexity"},
    [
        Row("Transformer", PLAIN, None, {"perplexity": None}),
        Row("Memorizing Transformer", memorizing("65K"), None, {"perplexity": None}),
        Row("Transformer, 4% of the steps more", LONGER, None, {"perplexity": None}, "4%"),
        Row("memory given, 4% of the steps more", AFTERWARDS, None, {"perplexity": None}, "4%"),
        Row("Transformer, 20% of the steps more", LONGER, None, {"perplexity": None}, "20%"),
        Row("memory given, 20% of the steps more", AFTERWARDS, None, {"perplexity": None}, "20%"),
    ],
    change="perplexity",
)
main, table = TABLE.main, TABLE.table
