"""Which index a store on Milvus has, and how well it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mnemic.errors import UsageError
from mnemic.stores.config import StoreConfig
from mnemic.stores.milvus.server import EVERY_LIST, LARGEST_DIM

EXACT_ROWS = 1 << 16  # up to which every row is looked at
LISTS = 1024
SAMPLE, DEPTH = 64, 32  # queries, and rows found for each, when the recall is measured


def check(config: StoreConfig) -> None:
    """Refuses settings that Milvus, or this store on it, has nothing for."""
    if config.keys == "codes":
        raise UsageError("keys = 'codes': a store on Milvus keeps its keys: choose 'float16' or 'float32'")
    if config.transform:
        raise UsageError(f"transform = {config.transform!r}: a store on Milvus has none: leave it out")
    if config.dim > LARGEST_DIM:
        raise UsageError(f"dim = {config.dim}: Milvus takes keys of up to {LARGEST_DIM} numbers")
    if config.index != "auto" and not known(config.index):
        raise UsageError(f"index = {config.index!r}: a store on Milvus has 'auto', 'exact' and 'IVF1024,Flat'")


def known(index: str) -> bool:
    """Whether there is such an index."""
    lists = re.fullmatch(r"IVF([1-9]\d{0,4}),Flat", index)
    return index == "exact" or (lists is not None and int(lists[1]) <= EVERY_LIST)


def choose(config: StoreConfig, rows: int, current: str = "exact") -> str:
    """The index for that many rows; one that was made stays."""
    if config.index != "auto":
        return config.index
    return f"IVF{LISTS},Flat" if rows > EXACT_ROWS and current == "exact" else current


def enough_lists(curve: Sequence[Sequence[float]], recall: float) -> int:
    """How many lists to look into for that recall."""
    enough = [int(lists) for lists, measured in curve if measured >= recall]
    return min(enough, default=EVERY_LIST) if recall < 1 else EVERY_LIST


def measure(nearest: Callable[[int], list[list[int]]]) -> list[list[float]]:
    """The recall for each number of lists: [lists, recall], until nothing is missed.

    `nearest` gives the numbers of the nearest rows of each query, when so many lists are looked into.
    """
    truth = [set(row) for row in nearest(EVERY_LIST)]
    curve, lists, recall = list[list[float]](), 1, 0.0
    while recall < 1 and lists < EVERY_LIST:
        hits = sum(len(true & set(row)) for true, row in zip(truth, nearest(lists), strict=True))
        recall = hits / max(1, sum(map(len, truth)))
        curve.append([lists, recall])
        lists *= 2
    return curve
