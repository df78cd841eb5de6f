"""What a store of a given size would take, for each kind of index, from rates measured on this machine."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mnemic.errors import UsageError
from mnemic.stores.config import StoreConfig

ROW = 4 + 4  # bytes of a value and a position
LISTS_ASKED = 32  # lists that a search looks into; what trained models' keys needed for a recall of 0.95 at 32
REFINED = 4 * 32  # rows that a search looks at again
MOST_ROWS = 10**12
LONGEST_SEARCH = 1.0  # seconds; a kind that needs more for one query is no choice


@dataclass(frozen=True)
class Rates:
    """How fast this machine is: numbers a second, on all of its processors, but for the disk's bytes."""

    compared: float  # numbers multiplied when vectors are compared with many others
    scanned: float  # numbers of float16 vectors looked at, for one query
    codes: float  # numbers of vectors looked at in 4-bit codes, for one query
    encoded: float  # numbers of vectors made into 4-bit codes
    written: float  # bytes made durable
    memory: int  # bytes of memory that the machine has


@dataclass(frozen=True)
class Plan:
    """What one kind of index takes."""

    kind: str
    index: str
    disk: float  # bytes
    memory: float  # bytes
    build: float  # seconds, without making the keys
    search: float  # seconds for one query
    verdict: str


def measure(dim: int) -> Rates:
    """Measures this machine in a few seconds, with random vectors of this width."""
    import faiss

    rng = np.random.default_rng(0)
    width = max(dim // 2 * 2, 2)
    count = max(2048, min(65536, (1 << 23) // width))
    vectors = rng.standard_normal((count, width), dtype=np.float32)
    flat = faiss.IndexFlatL2(width)
    flat.add(vectors[:1024])
    compared = count * 1024 * width / _least(lambda: flat.search(vectors, 1))
    rates = []
    for factory in ("IVF1,SQfp16", f"IVF1,PQ{width // 2}x4fs"):
        index = faiss.index_factory(width, factory)
        index.cp.min_points_per_centroid = 1
        index.train(vectors[:2048])
        start = time.perf_counter()
        index.add(vectors)
        encoded = count * width / (time.perf_counter() - start)
        rates.append(count * width / _least(lambda index=index: index.search(vectors[:1], 32), 20))  # type: ignore[misc]
    return Rates(compared, rates[0], rates[1], encoded, _written(), _memory())


def _least(work: Callable[[], object], repeats: int = 3) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _written() -> float:
    data = os.urandom(1 << 25)
    with tempfile.NamedTemporaryFile() as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return len(data) / (time.perf_counter() - start)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan(rows: float, dim: int, rates: Rates | None = None) -> list[Plan]:
    """One plan for each kind of index, and one for a cluster where no single machine will do."""
    if not 1 <= rows <= MOST_ROWS or rows != int(rows):
        raise UsageError(f"rows = {rows:g}: expected a whole number from 1 to 1e12")
    StoreConfig(dim=dim)
    rates = rates or measure(dim)
    rows = int(rows)
    plans = [
        _exact(rows, dim, rates),
        *(_inverted(rows, dim, rates, kind) for kind in ("plain", "compressed", "codes")),
    ]
    if not any(one.verdict == "fits" for one in plans):
        plans.append(_cluster(rows, dim, rates))
    return plans


def best(plans: list[Plan]) -> Plan:
    """The plan to choose: of those that fit the one that searches fastest, else the last one, the cluster."""
    fitting = [one for one in plans if one.verdict == "fits"]
    return min(fitting, key=lambda one: one.search) if fitting else plans[-1]


def _exact(rows: int, dim: int, rates: Rates) -> Plan:
    disk = rows * (2 * dim + ROW)
    memory = min(rows * 4 * dim, 1 << 26)
    return _judged("exact", "", disk, memory, disk / rates.written, rows * dim / rates.scanned, rates)


def _inverted(rows: int, dim: int, rates: Rates, kind: str) -> Plan:
    from mnemic.stores.disk.index import POINTS_PER_LIST

    lists = 2 ** int(math.log2(2 * math.sqrt(rows)))
    parts = max(dim // 2, 1)
    code = 2 * dim if kind == "plain" else parts / 2
    index = rows * (code + 8) + lists * dim * 4
    disk = index + rows * (ROW + (0 if kind == "codes" else 2 * dim))
    training = min(POINTS_PER_LIST * lists, rows) * lists * dim * 10 / rates.compared
    adding = rows * lists * dim / rates.compared + (rows * dim / rates.encoded if kind != "plain" else 0)
    looked_at = min(LISTS_ASKED / lists, 1) * rows * dim / (rates.scanned if kind == "plain" else rates.codes)
    again = REFINED * dim / rates.scanned if kind == "compressed" else 0
    search = lists * dim / rates.scanned + looked_at + again
    name = f"IVF{lists},{'SQfp16' if kind == 'plain' else f'PQ{parts}x4fs'}"
    title = {"plain": "vectors in lists", "compressed": "4-bit codes, keys kept", "codes": "4-bit codes only"}[kind]
    return _judged(title, name, disk, index, training + adding + disk / rates.written, search, rates)


def _judged(kind: str, index: str, disk: float, memory: float, build: float, search: float, rates: Rates) -> Plan:
    verdict = "fits"
    if memory > 0.8 * rates.memory:
        verdict = "more memory than this machine has"
    elif search > LONGEST_SEARCH:
        verdict = "too slow"
    return Plan(kind, index, disk, memory, build, search, verdict)


def _cluster(rows: int, dim: int, rates: Rates) -> Plan:
    """Milvus: the rows divided among as many machines as this one as their codes need memory for."""
    whole = _inverted(rows, dim, rates, "compressed")
    machines = math.ceil(whole.memory / (0.5 * rates.memory))
    part = _inverted(max(rows // machines, 1), dim, rates, "compressed")
    verdict = f"Milvus on {machines} machines like this one"
    return Plan("cluster", "milvus://", whole.disk, whole.memory, part.build, part.search, verdict)
