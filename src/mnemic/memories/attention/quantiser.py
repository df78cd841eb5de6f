"""The points around which keys are listed: learned from the keys themselves, kept from document to document."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

FEWEST = 4096  # keys that are worth lists
ROOM = 1.15  # of a list, so that it need not move for each key that comes


class Quantiser:
    """For each head of a layer, points among its keys, and how many of their lists a query looks into.

    Points are learned again when a memory has grown fourfold since, when it is full, and whenever it has been
    replaced once: keys change while a model learns.
    """

    def __init__(self, size: int, k: int, recall: float) -> None:
        self.size, self.k, self.wanted = size, k, recall
        self.points: list[Any] = []  # a FAISS index a head
        self.probes: list[int] = []
        self.generation = 0
        self.learned_from = 0
        self.written = 0

    @property
    def learned(self) -> bool:
        """Whether there are points."""
        return bool(self.points)

    def is_due(self, held: int) -> bool:
        """Whether points are to be learned from the `held` keys of a memory."""
        if held < FEWEST:
            return False
        full = held >= self.size and self.learned_from < self.size
        return not self.learned or held >= 4 * self.learned_from or full or self.written >= self.size

    def learn(self, keys: Tensor, queries: Tensor | None) -> None:
        """Learns points from keys (H, n, d), and from queries (H, m, d) how many lists are worth a look."""
        heads, count, width = keys.shape
        lists = 2 ** round(math.log2(2 * math.sqrt(count)))
        self.points, self.probes = [], []
        for head in range(heads):
            own = keys[head].float().numpy()
            kmeans = faiss.Clustering(width, lists)
            kmeans.niter, kmeans.spherical = 6, True
            kmeans.min_points_per_centroid, kmeans.max_points_per_centroid = 1, 64
            kmeans.seed = 1234
            points = faiss.IndexFlatIP(width)
            kmeans.train(own, points)
            self.points.append(points)
        self.generation += 1
        self.learned_from, self.written = count, 0
        for head in range(heads):
            asked = keys[head, -64:] if queries is None else queries[head]
            self.probes.append(self._enough(head, keys[head], asked))

    def _enough(self, head: int, keys: Tensor, queries: Tensor) -> int:
        """The least number of lists, of 4, 8, 16 ..., with which a head's queries find the share that is wanted."""
        self.probes.append(4)
        index = self.index(head, keys, torch.float32, 0)
        self.probes.pop()
        asked, k = queries.float().numpy(), min(self.k, len(keys))
        _, true = faiss.knn(asked, keys.float().numpy(), k, metric=faiss.METRIC_INNER_PRODUCT)
        while index.nprobe < index.nlist and _share(index.search(asked, k)[1], true) < self.wanted:
            index.nprobe *= 2
        return int(index.nprobe)

    def index(self, head: int, keys: Tensor, dtype: torch.dtype, first: int) -> Any:
        """Lists of the keys (n, d) of a head, whose numbers begin at `first`."""
        points, width = self.points[head], keys.shape[1]
        if dtype == torch.float16:
            kind = faiss.ScalarQuantizer.QT_fp16
            index = faiss.IndexIVFScalarQuantizer(points, width, points.ntotal, kind, faiss.METRIC_INNER_PRODUCT, False)
        else:
            index = faiss.IndexIVFFlat(points, width, points.ntotal, faiss.METRIC_INNER_PRODUCT)
        index.is_trained, index.nprobe = True, self.probes[head]
        vectors = keys.float().numpy()
        nearest = index.quantizer.search(vectors, 1)[1].ravel()
        for number, count in enumerate(np.bincount(nearest, minlength=index.nlist).tolist()):
            index.invlists.resize(number, int(count * ROOM) + 4)  # a list keeps its room when it is emptied
            index.invlists.resize(number, 0)
        index.add_with_ids(vectors, np.arange(first, first + len(vectors)))
        return index

    def load(self, points: Tensor, probes: list[int], learned_from: int, written: int) -> None:
        """Goes on with points (lists, H, d) that were learned before."""
        self.points, self.probes = [], probes
        for own in points.unbind(1):
            self.points.append(faiss.IndexFlatIP(points.shape[2]))
            self.points[-1].add(own.contiguous().numpy())
        self.learned_from, self.written = learned_from, written
        self.generation += 1

    def add(self, index: Any, keys: Tensor, numbers: range) -> None:
        """Lists more keys (n, d)."""
        index.add_with_ids(keys.float().numpy(), np.arange(numbers.start, numbers.stop))


def listed_keys(index: Any, first: int, end: int) -> Tensor:
    """The keys that are listed under the numbers `first` to `end`, in order: (n, d)."""
    found = np.zeros((max(end - first, 0), index.code_size), dtype=np.uint8)
    lists = index.invlists
    for number in range(index.nlist):
        if not (size := lists.list_size(number)):
            continue
        ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
        codes = faiss.rev_swig_ptr(lists.get_codes(number), size * index.code_size).reshape(size, -1)
        kept = ids >= first
        found[ids[kept] - first] = codes[kept]
    kind = np.float32 if index.code_size == 4 * index.d else np.float16
    return torch.from_numpy(found.view(kind))


def exactly_listed(indexes: list[Any], queries: Tensor, k: int, first: int, end: int) -> float:
    """The share of the true k nearest of all listed keys that the lists' own search finds, over all heads."""
    shares = []
    for index, asked in zip(indexes, queries.float().numpy(), strict=True):
        keys = listed_keys(index, first, end).float().numpy()
        most = min(k, len(keys))
        _, true = faiss.knn(asked, keys, most, metric=faiss.METRIC_INNER_PRODUCT)
        shares.append(_share(index.search(asked, most)[1] - first, true))
    return float(np.mean(shares))


def _share(found: np.ndarray, true: np.ndarray) -> float:
    """The share of each row of `true` that is in the same row of `found`, on average."""
    return float(np.mean([np.isin(t, f).mean() for f, t in zip(found, true, strict=True)]))
