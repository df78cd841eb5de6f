"""The keys of one head in lists around points (FAISS): cheap to add to, to take from, and to search."""

from __future__ import annotations

import copy
import math
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

ROOM = 1.1  # of a list, so that it need not move for each key that comes
FIRST, AGAIN = 6, 2  # rounds of k-means: for new points, and for points that have been in use


class Lists:
    """Numbered keys (n, d) in lists; a query looks into the `probes` lists whose points are nearest to it.

    Points are learned from the keys and stay when the keys are cleared; learned again, they begin where they were.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype
        self.points: Any = None  # a FAISS index of the points
        self.probes = 4
        self.index: Any = None  # a FAISS index of the keys
        self.first = 0  # keys with lower numbers are forgotten,
        self.stale = False  # and some of them are still listed

    def learn(self, keys: Tensor, first: int, queries: Tensor, k: int, wanted: float) -> None:
        """Learns points from keys (n, d) numbered from `first`, and lists these.

        `queries` (m, d) tell how many lists are worth a look: so many that they find the share `wanted` of the true
        nearest k.
        """
        count = 2 ** round(math.log2(2 * math.sqrt(len(keys))))
        own = keys.float().numpy()
        kmeans = faiss.Clustering(self.width, count)
        kmeans.niter, kmeans.spherical, kmeans.seed = FIRST, True, 1234
        kmeans.min_points_per_centroid, kmeans.max_points_per_centroid = 1, 40
        if self.points is not None and self.points.ntotal == count:
            kmeans.niter = AGAIN
            faiss.copy_array_to_vector(self.points.reconstruct_n(0, count).ravel(), kmeans.centroids)
        self.points = faiss.IndexFlatIP(self.width)
        kmeans.train(own, self.points)
        self.fill(own, first)
        self.probes = 2
        self.adjust(queries, k, wanted)

    def adjust(self, queries: Tensor, k: int, wanted: float) -> None:
        """Looks into more lists if a search finds less than it shall; into fewer, not below half, if it finds more."""
        asked = queries.float().numpy()
        true = self._found(asked, k, self.index.nlist)

        def finds(probes: int) -> float:
            return share(self._found(asked, k, probes), true)

        few, many, now = max(self.probes // 2, 1) - 1, self.probes, finds(self.probes)
        if wanted <= now <= wanted + 0.02:
            return
        while now < wanted and many < self.index.nlist:
            few, many = many, min(2 * many, self.index.nlist)
            now = finds(many)
        while many - few > max(few // 8, 1):
            middle = (few + many) // 2
            few, many = (middle, many) if finds(middle) < wanted else (few, middle)
        self.probes = many

    def recall(self, queries: Tensor, k: int) -> float:
        """The share of the true nearest k that a search finds."""
        asked = queries.float().numpy()
        return share(self._found(asked, k, self.probes), self._found(asked, k, self.index.nlist))

    def _found(self, queries: Any, k: int, probes: int) -> np.ndarray:
        """The numbers that are found when so many lists are looked into; with all of them, the true nearest."""
        past = {"sel": faiss.IDSelectorRange(self.first, np.iinfo(np.int64).max)} if self.stale else {}
        found: np.ndarray = self.index.search(queries, k, params=faiss.SearchParametersIVF(nprobe=probes, **past))[1]
        return found

    def fill(self, keys: Any, first: int) -> None:
        """Lists keys (n, d) numbered from `first`, and no others."""
        if self.dtype == torch.float16:
            kind = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
            self.index = faiss.IndexIVFScalarQuantizer(self.points, self.width, self.points.ntotal, *kind)
        else:
            self.index = faiss.IndexIVFFlat(self.points, self.width, self.points.ntotal, faiss.METRIC_INNER_PRODUCT)
        self.index.is_trained = True
        self.first, self.stale = first, False
        nearest = self.points.search(keys, 1)[1].ravel()
        for number, count in enumerate(np.bincount(nearest, minlength=self.points.ntotal).tolist()):
            _give_room(self.index.invlists, number, count)
        self.add(keys, first)

    def compact(self) -> None:
        """Gives back what lists have taken and do not need: they double to grow, and keep it when they shrink."""
        old = self.index.invlists
        new = faiss.ArrayInvertedLists(self.index.nlist, self.index.code_size)
        sizes = [old.list_size(number) for number in range(self.index.nlist)]
        for number, size in enumerate(sizes):
            _give_room(new, number, size)
        new.merge_from(old, 0)
        self.index.replace_invlists(new, True)
        new.this.disown()

    def add(self, keys: Any, first: int) -> None:
        """Lists more keys (n, d), numbered from `first`."""
        self.index.add_with_ids(np.ascontiguousarray(keys, dtype=np.float32), np.arange(first, first + len(keys)))

    def forget(self, first: int, take_out: bool) -> None:
        """Finds the keys before number `first` no more; takes them out of their lists, or leaves that for later."""
        if take_out:
            self.index.remove_ids(faiss.IDSelectorRange(0, first))
        self.stale = not take_out and (self.stale or first > self.first)
        self.first = first

    def search(self, queries: Tensor, numbers: Tensor, keys: Tensor) -> None:
        """Writes the numbers (T, k) of the nearest keys, -1 where there are too few, and these keys (T, k, d).

        Keys that are forgotten and still listed are among them.
        """
        found, vectors = numbers.numpy(), keys.numpy()
        how = faiss.SearchParametersIVF(nprobe=self.probes)
        self.index.search_and_reconstruct(queries.float().numpy(), found.shape[1], params=how, I=found, R=vectors)
        if (found < 0).any():
            vectors[found < 0] = 0  # FAISS leaves no numbers there

    def keys(self, first: int, end: int) -> Tensor:
        """The keys numbered `first` to `end`, in order."""
        found = np.zeros((max(end - first, 0), self.index.code_size), dtype=np.uint8)
        lists = self.index.invlists
        for number in range(self.index.nlist):
            if not (size := lists.list_size(number)):
                continue
            ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * self.index.code_size).reshape(size, -1)
            kept = ids >= first
            found[ids[kept] - first] = codes[kept]
        return torch.from_numpy(found.view(np.float16 if self.dtype == torch.float16 else np.float32))

    def copy(self) -> Lists:
        """The same lists once more; points are never changed, and so shared."""
        twin = copy.copy(self)
        twin.index = faiss.clone_index(self.index) if self.index is not None else None
        return twin

    def learned(self) -> Tensor:
        """The points (lists, d)."""
        return torch.from_numpy(self.points.reconstruct_n(0, self.points.ntotal))

    def load(self, points: Tensor, probes: int) -> None:
        """Goes on with points that were learned before."""
        self.points, self.probes = faiss.IndexFlatIP(self.width), probes
        self.points.add(points.contiguous().numpy())


def _give_room(lists: Any, number: int, expected: int) -> None:
    """Makes room in an empty list for a few more keys than are expected, which it keeps when it is emptied."""
    lists.resize(number, int(expected * ROOM) + 4)
    lists.resize(number, 0)


def share(found: np.ndarray, true: np.ndarray) -> float:
    """The share of each row of `true` that is in the same row of `found`, on average; -1 stands for none."""
    there = true >= 0
    hits = np.array([np.isin(t, f) for f, t in zip(found, true, strict=True)]) & there
    return float((hits.sum(1) / there.sum(1).clip(1)).mean())
