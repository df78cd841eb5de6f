"""Figure 3: long-term memories of growing size."""

from tables.harness import Row, Table, Testing
from tables.models import LONG, PLAIN

SHARES = {"0": 0, "1/4": 1 / 4, "1/2": 1 / 2, "1": 1}  # of the largest
TEXTS = {"words": "", "words, shorter segments": "shorter", "bytes": "bytes"}

TABLE = Table(
    "TRIME, Figure 3",
    dict.fromkeys(SHARES, "valid/perplexity"),
    [
        Row(f"{method}, {text}", trained, Testing(long=share, joint=joint, tune_long=False), {name: None}, variant)
        for text, variant in TEXTS.items()
        for method, trained, joint in (("continuous cache", PLAIN, False), ("TRIME long", LONG, True))
        for name, share in SHARES.items()
    ],
)
main, table = TABLE.main, TABLE.table
