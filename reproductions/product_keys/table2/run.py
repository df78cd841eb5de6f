"""Table 2: the perplexity of hidden tokens and how the memory is used, with PKM and ResM, from scratch and initialised.

The usage is that on the held-out text of the first column; the two layers with a memory are the 2nd and the 4th of 6.
"""

from __future__ import annotations

from product_keys.rows import MODELS
from tables.harness import Row, Table

LAYERS = {"lower": 1, "upper": 3}
FIGURES = {"top-1": "top1_usage", "KL_u": "kl_reads", "KL_w": "kl_weights"}
USAGE = {
    f"{figure}, {layer}": f"test/memory_usage/{number}/{name}"
    for figure, name in FIGURES.items()
    for layer, number in LAYERS.items()
}
PAPER = {  # top-1 MU, KL_u, KL_w of the 4th and 8th layer; WT-2, WT-103, PG-19
    "(a) BERT": ((), 3.49, 3.86, 6.18),
    "(b) + as many steps": ((), 3.40, 3.72, 5.88),
    "(c) + PKM": ((0.022, 0.841, 1.62, 0.89, 1.99, 1.13), 3.26, 3.39, 5.53),
    "(d) + ResM": ((0.750, 0.810, 1.50, 0.71, 1.80, 0.92), 3.26, 3.36, 5.45),
    "(e) + Init + PKM": ((0.974, 0.957, 0.53, 0.69, 0.68, 0.88), 3.14, 3.26, 5.22),
    "(f) + Init + ResM": ((0.982, 0.973, 0.45, 0.46, 0.58, 0.60), 3.10, 3.20, 5.14),
}


def rows() -> list[Row]:
    """A row for each model and text; the usage goes with the first text."""
    found = []
    for label, (usage, *perplexities) in PAPER.items():
        for column, figure in zip(("WT-2", "WT-103", "PG-19"), perplexities, strict=True):
            more = dict(zip(USAGE, usage, strict=False)) if column == "WT-2" else {}
            found.append(Row(label, MODELS[label], None, {column: figure, **more}, column))
    return found


TABLE = Table(
    "Table 2",
    {"WT-2": "test/masked_perplexity", "WT-103": "test/masked_perplexity", "PG-19": "test/masked_perplexity", **USAGE},
    rows(),
)
main, table = TABLE.main, TABLE.table
