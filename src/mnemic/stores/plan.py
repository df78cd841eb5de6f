"""What a store of a given size would take, for each kind of index, from rates measured on this machine."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mnemic.errors import UsageError
from mnemic.stores.config import StoreConfig

ROW = 4 + 4  # bytes of a value and a position
MILVUS_ROW = 5 * 8 + 8  # bytes beside a key: id, value, position, document, namespace, and an empty name
MILVUS_SEGMENT = 1 << 29  # bytes of keys over which Milvus makes one index
MILVUS_POINTS = 256  # rows that train a list there
LISTS_ASKED = 32  # lists that a search looks into; what trained models' keys needed for a recall of 0.95 at 32
REFINED = 4 * 32  # rows that a search looks at again
MOST_ROWS = 10**12
LONGEST_SEARCH = 1.0  # seconds; a kind that needs more for one query is no choice
WIDEST_MEASURED = 1024  # numbers in a key; the rates of wider ones are the same
CODES, CLUSTER = "4-bit codes only", "cluster"
CODES_RECALL = "0.5 to 0.6"  # at 32, of trained models' keys: all lists looked into, but no second look
DIAL = "0.95"


@dataclass(frozen=True)
class Rates:
    """How fast this machine is: numbers a second, on all of its processors, but for the disk's bytes."""

    compared: float  # numbers multiplied when vectors are compared with many others
    scanned: float  # numbers of float16 vectors looked at, for one query
    whole: float  # the same of float32 vectors
    codes: float  # 4-bit codes looked at, for one query
    encoded: float  # numbers of vectors made into 4-bit codes
    written: float  # bytes made durable
    memory: int  # bytes of memory that the machine has
    disk: int  # bytes that are free on the disk of the working folder


@dataclass(frozen=True)
class Plan:
    """What one kind of index takes."""

    kind: str
    index: str
    setting: str  # how a store gets this index; "" if it chooses it by itself
    recall: str  # at 32 results
    disk: float  # bytes
    memory: float  # bytes
    build: float  # seconds, without making the keys
    search: float  # seconds for one query
    verdict: str


def measure(dim: int) -> Rates:
    """Measures this machine in a few seconds, with random vectors of this width, or of less if it is large."""
    import faiss

    rng = np.random.default_rng(0)
    width = min(max(dim // 2 * 2, 2), WIDEST_MEASURED)
    count = max(2048, min(65536, (1 << 23) // width))
    vectors = rng.standard_normal((count, width), dtype=np.float32)
    flat = faiss.IndexFlatL2(width)
    flat.add(vectors[:1024])
    compared = count * 1024 * width / _least(lambda: flat.search(vectors, 1))
    rates = []
    parts = _parts(_compressed(MOST_ROWS, width))
    for factory, numbers in (("SQfp16", width), ("Flat", width), (f"PQ{parts}x4fs", parts)):
        index = faiss.index_factory(width, f"IVF1,{factory}")
        index.cp.min_points_per_centroid = 1
        index.train(vectors[:2048])
        start = time.perf_counter()
        index.add(vectors)
        encoded = count * width / (time.perf_counter() - start)
        rates.append(count * numbers / _least(lambda index=index: index.search(vectors[:1], 32), 20))  # type: ignore[misc]
    scanned, whole, codes = rates
    free = shutil.disk_usage(Path.cwd()).free
    return Rates(compared, scanned, whole, codes, encoded, _written(), _memory(), free)


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


def checked(rows: float, dim: int) -> int:
    """The number of rows; UsageError for what no store can have."""
    if not 1 <= rows <= MOST_ROWS or rows != int(rows):
        raise UsageError(f"rows = {rows:g}: expected a whole number from 1 to 1e12")
    StoreConfig(dim=dim)
    return int(rows)


def plan(rows: float, dim: int, rates: Rates | None = None) -> list[Plan]:
    """One plan for each kind of index, and one for a cluster where no single machine will do.

    There is but one for few rows, of which a store makes no index.
    """
    rows = checked(rows, dim)
    rates = rates or measure(dim)
    plans = [_exact(rows, dim, rates)]
    if _compressed(rows, dim):
        plans += [_inverted(rows, dim, rates, kind) for kind in ("plain", "compressed", "codes")]
    if not any(one.verdict == "fits" for one in plans) and dim <= widest_of_milvus():
        plans.append(_cluster(rows, dim, rates))
    return plans


def widest_of_milvus() -> int:
    """The most numbers in a key that Milvus takes."""
    from mnemic.stores.milvus.index import LARGEST_DIM

    return LARGEST_DIM


def best(plans: list[Plan]) -> Plan | None:
    """The plan to choose: of those that fit the one that searches fastest, else the cluster, if there is one.

    Codes only, which find far less, are chosen where nothing with keys fits.
    """
    fitting = [one for one in plans if one.verdict == "fits"]
    with_keys = [one for one in fitting if one.kind != CODES]
    if fitting:
        return min(with_keys or fitting, key=lambda one: one.search)
    return next((one for one in plans if one.kind == CLUSTER), None)


def _compressed(rows: int, dim: int) -> str:
    """The factory string of the 4-bit codes of so many rows; "" if they are so few that all are looked at."""
    from mnemic.stores.disk.index import choose

    return choose(StoreConfig(dim=dim, keys="codes"), rows)


def _number(of: str, factory: str) -> int:
    return int(re.findall(rf"(?<![A-Z]){of}(\d+)", factory)[0])


def _parts(factory: str) -> int:
    return _number("PQ", factory)


def _exact(rows: int, dim: int, rates: Rates) -> Plan:
    disk = rows * (2 * dim + ROW)
    memory = min(rows * 4 * dim, 1 << 26)
    setting = "--index exact" if _compressed(rows, dim) else ""
    what = ("exact", "", setting, "1")
    return _judged(what, disk, memory, disk / rates.written, rows * dim / rates.scanned, rates)


def _inverted(rows: int, dim: int, rates: Rates, kind: str) -> Plan:
    from mnemic.stores.disk.index import POINTS_PER_LIST, choose

    name = _compressed(rows, dim)
    lists, parts = _number("IVF", name), _parts(name)
    if kind == "plain":
        name = f"IVF{lists},SQfp16"
    code = 2 * dim if kind == "plain" else -(-parts // 2)
    index = rows * (code + 8) + lists * dim * 4
    disk = index + rows * (ROW + (0 if kind == "codes" else 2 * dim))
    training = min(POINTS_PER_LIST * lists, rows) * lists * dim * 10 / rates.compared
    adding = rows * lists * dim / rates.compared + (rows * dim / rates.encoded if kind != "plain" else 0)
    row = dim / rates.scanned if kind == "plain" else parts / rates.codes
    again = REFINED * dim / rates.scanned if kind == "compressed" else 0
    search = lists * dim / rates.scanned + min(LISTS_ASKED / lists, 1) * rows * row + again
    title = {"plain": "vectors in lists", "compressed": "4-bit codes, keys kept", "codes": CODES}[kind]
    by_itself = choose(StoreConfig(dim=dim), rows) == name
    setting = "--keys codes" if kind == "codes" else "" if by_itself else f"--index {name}"
    what = (title, name, setting, CODES_RECALL if kind == "codes" else DIAL)
    return _judged(what, disk, index, training + adding + disk / rates.written, search, rates)


def _judged(
    what: tuple[str, str, str, str], disk: float, memory: float, build: float, search: float, rates: Rates
) -> Plan:
    verdict = "fits"
    if memory > 0.8 * rates.memory:
        verdict = "more memory than this machine has"
    elif disk > rates.disk:
        verdict = "more disk than is free here"
    elif search > LONGEST_SEARCH:
        verdict = "too slow"
    return Plan(*what, disk, memory, build, search, verdict)


def _cluster(rows: int, dim: int, rates: Rates) -> Plan:
    """Milvus: the rows divided among as many machines like this one as their keys, all in memory, need.

    An index is made over each segment by itself, so that the same share of all rows is looked at, however many.
    """
    from mnemic.stores.milvus.index import choose

    index = choose(StoreConfig(dim=dim), rows)
    lists = 1 if index == "exact" else _number("IVF", index)
    memory = rows * (4 * dim + MILVUS_ROW) + math.ceil(rows * 4 * dim / MILVUS_SEGMENT) * lists * dim * 4
    machines = math.ceil(max(memory / (0.5 * rates.memory), memory / max(rates.disk, 1)))
    here = math.ceil(rows / machines)
    segments = math.ceil(here * 4 * dim / MILVUS_SEGMENT)
    training = min(segments * MILVUS_POINTS * lists, here) * lists * dim * 10 / rates.compared
    build = training + here * lists * dim / rates.compared + memory / machines / rates.written
    search = segments * lists * dim / rates.whole + min(LISTS_ASKED / lists, 1) * here * dim / rates.whole
    verdict = f"Milvus on {machines:,} machine{'s' * (machines > 1)} like this one"
    return Plan(
        CLUSTER, index, "milvus://host:19530/name", DIAL if lists > 1 else "1", memory, memory, build, search, verdict
    )
