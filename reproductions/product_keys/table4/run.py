"""Table 4: what the models of Table 2 learn of GLUE and SQuAD, fine-tuned with the settings of Table 3."""

from product_keys.rows import MODELS
from tables.finetuned import TaskRow, TaskTable, share

COLUMNS = {
    "SQuAD EM": ("squad", share("exact_match")),
    "SQuAD F1": ("squad", share("f1")),
    "MNLI-m": ("glue/mnli", share("accuracy")),
    "MNLI-mm": ("glue/mnli", share("accuracy_mismatched")),
    "QQP": ("glue/qqp", share("accuracy")),
    "QNLI": ("glue/qnli", share("accuracy")),
    "SST-2": ("glue/sst2", share("accuracy")),
    "CoLA": ("glue/cola", share("matthews")),
}
PAPER = {
    "(a) BERT": (82.7, 89.8, 84.3, 84.5, 91.0, 89.3, 92.8, 60.8),
    "(b) + as many steps": (83.3, 90.1, 84.8, 84.9, 91.2, 89.2, 92.4, 61.4),
    "(c) + PKM": (81.9, 89.1, 84.4, 85.0, 91.1, 89.0, 93.6, 59.7),
    "(d) + ResM": (81.5, 89.4, 84.6, 84.8, 91.0, 88.2, 93.2, 62.8),
    "(e) + Init + PKM": (83.8, 90.6, 85.8, 85.6, 91.2, 90.0, 93.6, 63.6),
    "(f) + Init + ResM": (83.9, 90.8, 86.0, 85.8, 91.4, 90.4, 94.0, 64.1),
}

TABLE = TaskTable(
    "Table 4",
    COLUMNS,
    [TaskRow(label, MODELS[label], dict(zip(COLUMNS, figures, strict=True))) for label, figures in PAPER.items()],
)
main, table = TABLE.main, TABLE.table
