"""Table 1: BLEU of the Transformer and of every variant with memory tokens, German to English."""

from __future__ import annotations

from memory_transformer.rows import TRANSFORMER, memory
from tables.harness import Row, Table

MODELS = {
    "Transformer": TRANSFORMER,
    "MemTransformer 5": memory(5),
    "MemTransformer 10": memory(10),
    "MemTransformer 20": memory(20),
    "MemCtrl 20": memory(20, "control"),
    "MemCtrl Shared 20": memory(20, "control-shared"),
    "MemBottleneck 10": memory(10, "bottleneck"),
    "MemBottleneck 20": memory(20, "bottleneck"),
    "MemBottleneck Skip 20": memory(20, "bottleneck-skip"),
}
PAPER: dict[str, dict[str, float | None]] = {  # by size; None: a row that the paper does not have
    "small": {
        "Transformer": 19.01,
        "MemTransformer 5": 19.17,
        "MemTransformer 10": None,
        "MemTransformer 20": None,
        "MemCtrl 20": None,
        "MemCtrl Shared 20": None,
        "MemBottleneck 10": 11.20,
        "MemBottleneck 20": 10.41,
        "MemBottleneck Skip 20": 16.45,
    },
    "base": {
        "Transformer": 24.65,
        "MemTransformer 10": 25.07,
        "MemTransformer 20": 25.58,
        "MemCtrl 20": 24.13,
        "MemCtrl Shared 20": 25.73,
    },
}

TABLE = Table(
    "Memory Transformer, Table 1",
    dict.fromkeys(PAPER, "test/bleu"),
    [
        Row(label, trained, None, {size: PAPER[size][label]}, size)
        for label, trained in MODELS.items()
        for size in PAPER
        if label in PAPER[size]
    ],
)
main, table = TABLE.main, TABLE.table
