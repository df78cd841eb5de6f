"""Table 6: how the memory is used after fine-tuning; figures of both layers on the dev split of each task.

The extract of the paper that is at hand has lost most of the numbers of rows (c), (d) and (f).
"""

from product_keys.rows import MODELS
from tables.finetuned import TaskRow, TaskTable, of_layer

FIGURES = {
    "MU": ("usage", 100.0),
    "top-1": ("top1_usage", 100.0),
    "KL_u": ("kl_reads", 1.0),
    "KL_w": ("kl_weights", 1.0),
}
TASKS = {"MNLI-m": "glue/mnli", "SST-2": "glue/sst2", "CoLA": "glue/cola"}
COLUMNS = {
    f"{task} {figure} {layer}": (name, of_layer(number, *place))
    for task, name in TASKS.items()
    for number, layer in enumerate(("lower", "upper"))
    for figure, place in FIGURES.items()
}
INIT_PKM = (100.0, 81.8, 1.33, 1.46, 99.9, 78.5, 1.76, 1.95, 91.2, 42.3, 3.52, 3.76, 86.3, 35.8, 2.81, 3.05)
INIT_PKM += (72.7, 26.3, 4.11, 4.29, 65.5, 21.9, 4.72, 4.93)
PAPER: dict[str, tuple[float | None, ...]] = {
    "(c) + PKM": (None,) * 24,
    "(d) + ResM": (None,) * 24,
    "(e) + Init + PKM": INIT_PKM,
    "(f) + Init + ResM": (None,) * 24,
}

TABLE = TaskTable(
    "Table 6",
    COLUMNS,
    [TaskRow(label, MODELS[label], dict(zip(COLUMNS, figures, strict=True))) for label, figures in PAPER.items()],
)
main, table = TABLE.main, TABLE.table
