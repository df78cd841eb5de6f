"""Table 3: memory extension. A trained MemTransformer 5 grows by 5 tokens at a time and is trained on after each.

Beside it, which the paper does not have: the same model trained on as long with the 5 tokens that it has, and the
Transformer without memory trained on as long.
"""

from __future__ import annotations

from memory_transformer.rows import TRANSFORMER, grown, longer, memory
from tables.harness import Row, Table

PAPER = {5: 19.17, 10: 19.18, 15: 19.19, 20: 19.41}
STAGES = {5: "trained", 10: "+ 1 stage", 15: "+ 2 stages", 20: "+ 3 stages"}


def rows() -> list[Row]:
    """A row for the memory that grows, one for that which does not, and one without."""
    growing = staying = memory(5)
    without = TRANSFORMER
    found = []
    for count, stage in STAGES.items():
        if count > 5:
            growing, staying, without = grown(growing, count), grown(staying, 5), longer(without)
        found.append(Row("5, 10, 15, 20 tokens", growing, None, {stage: PAPER[count]}))
        found.append(Row("5 tokens throughout", staying, None, {stage: None}))
        found.append(Row("no memory", without, None, {stage: None}))
    return found


TABLE = Table("Memory Transformer, Table 3", dict.fromkeys(STAGES.values(), "test/bleu"), rows())
main, table = TABLE.main, TABLE.table
