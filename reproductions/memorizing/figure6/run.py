"""Figure 6: a trained model without memory learns to use one; and so do other architectures."""

from memorizing.rows import PLAIN, memorizing
from tables.harness import Row, Table
from tables.models import Trained

from mnemic import KNNAttention

AFTERWARDS = memorizing("65K", PLAIN, mix="tanh", normalise="memory")
AS_CONTEXT = {name: value for name, value in KNNAttention.starts["as_context"].items() if name != "size"}
LONGER = Trained("plain-longer", "documents", start=PLAIN)

SMOLLM2 = "SmolLM2-135M"
NOTHING = {"perplexity": None}


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
        Row(SMOLLM2, PLAIN, None, NOTHING, SMOLLM2, SMOLLM2),
        Row(f"{SMOLLM2}, contexts of 2048 in place of 512", PLAIN, None, NOTHING, f"{SMOLLM2}+wide", SMOLLM2),
        Row(f"{SMOLLM2}, memory as context", memorizing("65K", **AS_CONTEXT), None, NOTHING, SMOLLM2, SMOLLM2),
        Row(
            f"{SMOLLM2}, memory as context, gates and scales trained",
            memorizing("65K", PLAIN, **AS_CONTEXT),
            None,
            NOTHING,
            SMOLLM2,
            SMOLLM2,
        ),
        Row("GPT-2", PLAIN, None, NOTHING, "GPT-2", "GPT-2"),
        Row("GPT-2, 20% of the steps more", LONGER, None, NOTHING, "GPT-2+20%", "GPT-2"),
        Row("GPT-2, memory given, 20% of the steps more", AFTERWARDS, None, NOTHING, "GPT-2+20%", "GPT-2"),
        Row("GPT-2 with a memory from the start", memorizing("65K"), None, NOTHING, "GPT-2", "GPT-2"),
    ],
    change="perplexity",
)
main, table = TABLE.main, TABLE.table
