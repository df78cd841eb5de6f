"""Table 7: DistilBERT with and without Init + ResM, beside BERT."""

from product_keys.rows import MODELS
from tables.finetuned import TaskRow, TaskTable, share

COLUMNS = {
    "SQuAD EM": ("squad", share("exact_match")),
    "SQuAD F1": ("squad", share("f1")),
    "MNLI-m": ("glue/mnli", share("accuracy")),
    "SST-2": ("glue/sst2", share("accuracy")),
}
PAPER = {
    "DistilBERT": ("(a) BERT", (77.4, 85.7, 82.0, 91.6)),
    "+ Init + ResM": ("(f) + Init + ResM", (80.4, 88.3, 84.1, 93.3)),
}

TABLE = TaskTable(
    "Table 7",
    COLUMNS,
    [
        TaskRow(label, MODELS[model], dict(zip(COLUMNS, figures, strict=True)))
        for label, (model, figures) in PAPER.items()
    ],
)
main, table = TABLE.main, TABLE.table
