"""Table 5: the memory learns in fine-tuning too (Y), or stays as it is (N)."""

from product_keys.rows import MODELS
from tables.finetuned import TaskRow, TaskTable, share

COLUMNS = {
    "SQuAD EM": ("squad", share("exact_match")),
    "SQuAD F1": ("squad", share("f1")),
    "MNLI-m": ("glue/mnli", share("accuracy")),
    "SST-2": ("glue/sst2", share("accuracy")),
    "CoLA": ("glue/cola", share("matthews")),
}
PAPER = {
    "(c) + PKM": ((81.9, 89.1, 84.4, 93.6, 59.7), (82.0, 89.0, 84.1, 93.0, 56.5)),
    "(d) + ResM": ((81.5, 89.4, 84.6, 93.2, 62.8), (82.2, 89.5, 84.3, 92.7, 59.9)),
    "(e) + Init + PKM": ((83.8, 90.6, 85.8, 93.6, 63.6), (83.7, 90.4, 85.5, 93.3, 58.8)),
    "(f) + Init + ResM": ((83.9, 90.8, 86.0, 94.0, 64.1), (84.2, 90.8, 85.8, 93.3, 61.6)),
}


def rows() -> list[TaskRow]:
    """Two rows for each model."""
    return [
        TaskRow(f"{label}, {said}", MODELS[label], dict(zip(COLUMNS, figures, strict=True)), trainable)
        for label, both in PAPER.items()
        for said, trainable, figures in zip("YN", ("all", "base"), both, strict=True)
    ]


TABLE = TaskTable("Table 5", COLUMNS, rows())
main, table = TABLE.main, TABLE.table
