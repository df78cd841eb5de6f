"""Table 7: each way to train with each memory of testing."""

from tables.harness import TRIME, Row, Table, Testing
from tables.models import EXT, LOCAL, LONG

MEMORIES = {
    "local": TRIME,
    "local + long": Testing(long=1, tune_long=False),
    "local + long + ext": Testing(long=1, store="home", tune_long=False),
}
TRAINED = {
    "TRIME": (LOCAL, (17.10, 17.17, 17.40)),
    "TRIME long": (LONG, (17.12, 17.01, 16.48)),
    "TRIME ext": (EXT, (17.99, 17.80, 15.51)),
}

TABLE = Table(
    "TRIME, Table 7",
    dict.fromkeys(MEMORIES, "valid/perplexity"),
    [
        Row(label, trained, testing, {memory: figure})
        for label, (trained, figures) in TRAINED.items()
        for (memory, testing), figure in zip(MEMORIES.items(), figures, strict=True)
    ],
)
main, table = TABLE.main, TABLE.table
