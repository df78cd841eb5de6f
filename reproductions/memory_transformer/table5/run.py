"""Table 5: what an encoder learns of GLUE with [mem] tokens that it gets for the task, labelled by [CLS] or by them."""

from tables.finetuned import TaskRow, TaskTable, share

from mnemic.memories.tokens.config import MemoryTokens

COLUMNS = {
    "CoLA": ("glue/cola", share("matthews")),
    "SST-2": ("glue/sst2", share("accuracy")),
    "MRPC F1": ("glue/mrpc", share("f1")),
    "MRPC acc.": ("glue/mrpc", share("accuracy")),
    "STS-B Pearson": ("glue/stsb", share("pearson")),
    "STS-B Spearman": ("glue/stsb", share("spearman")),
    "QQP F1": ("glue/qqp", share("f1")),
    "QQP acc.": ("glue/qqp", share("accuracy")),
    "MNLI-m": ("glue/mnli", share("accuracy")),
    "MNLI-mm": ("glue/mnli", share("accuracy_mismatched")),
    "QNLI": ("glue/qnli", share("accuracy")),
    "RTE": ("glue/rte", share("accuracy")),
}
PAPER = {
    "BERT-base": (62.9, 92.7, 90.2, 85.8, 86.0, 85.8, 86.6, 89.8, 83.0, 83.5, 90.5, 65.0),
    "5mem": (61.3, 92.4, 90.4, 86.4, 86.0, 85.8, 86.8, 90.1, 82.7, 83.3, 90.7, 68.0),
    "5mem+pool": (62.1, 92.3, 89.4, 84.8, 85.8, 85.6, 86.9, 90.2, 83.3, 83.3, 90.8, 60.2),
    "10mem": (60.6, 92.5, 91.3, 87.6, 86.6, 86.4, 86.4, 89.8, 82.8, 83.3, 90.5, 66.8),
    "10mem+pool": (62.6, 92.6, 90.2, 86.0, 86.7, 86.5, 87.1, 90.2, 83.1, 83.0, 90.7, 61.2),
    "20mem": (60.9, 92.4, 91.2, 87.5, 86.4, 86.2, 86.8, 90.1, 82.8, 83.1, 90.7, 65.3),
}
MEMORIES = {
    "BERT-base": [],
    "5mem": [MemoryTokens(count=5)],
    "5mem+pool": [MemoryTokens(count=5, pool=True)],
    "10mem": [MemoryTokens(count=10)],
    "10mem+pool": [MemoryTokens(count=10, pool=True)],
    "20mem": [MemoryTokens(count=20)],
}

TABLE = TaskTable(
    "Table 5",
    COLUMNS,
    [
        TaskRow(label, None, dict(zip(COLUMNS, figures, strict=True)), memories=MEMORIES[label])
        for label, figures in PAPER.items()
    ],
    middle="mean",
)
main, table = TABLE.main, TABLE.table
