"""Table 4: context, memory and XL cache, on five corpora."""

from memorizing.rows import CORPORA, PLAIN, by_corpus, memorizing
from tables.harness import Row, Table

NONE, SMALL, MEDIUM, LARGE = (memorizing(size) for size in ("none", "1536", "8192", "65K"))

TABLE = Table(
    "Memorizing Transformers, Table 4",
    dict.fromkeys(CORPORA, "test/perplexity"),
    [
        *by_corpus("512, no memory", PLAIN, "", 3.29, 13.71, 17.20, 3.05, 3.09),
        *(  # what is gained without any memory: the layer that would have one, as it is with one
            Row("512, no memory, queries and keys of that layer normalised", NONE, None, {corpus: None}, corpus)
            for corpus in ("GitHub", "Isabelle")
        ),
        *by_corpus("2048, no memory", PLAIN, "2048", 2.69, 12.37, 14.81, 2.22, 2.39),
        *by_corpus("512, XL cache, no memory", PLAIN, "xl", 2.67, 12.34, 15.38, 2.26, 2.46),
        *by_corpus("2048, XL cache, no memory", PLAIN, "2048+2048-xl", 2.42, 11.88, 14.03, 2.10, 2.16),
        *by_corpus("512, memory of 1536", SMALL, "", 2.61, 12.50, 14.97, 2.20, 2.33),
        *by_corpus("512, memory of 8192", MEDIUM, "", 2.49, 12.29, 14.42, 2.09, 2.19),
        *by_corpus("512, XL cache, memory of 8192", MEDIUM, "xl", 2.37, 11.93, 14.04, 2.03, 2.08),
        *by_corpus("512, XL cache, memory of 65K", LARGE, "xl", 2.31, 11.62, 14.04, 1.87, 2.06),
        *by_corpus("2048, XL cache, memory of 8192", MEDIUM, "2048+2048-xl", 2.33, 11.84, 13.80, 1.98, 2.06),
        *by_corpus("2048, XL cache, memory of 65K", LARGE, "2048+2048-xl", 2.26, 11.37, 13.64, 1.80, 1.99),
    ],
)
main, table = TABLE.main, TABLE.table
