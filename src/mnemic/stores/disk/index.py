"""FAISS under the rows: which index, how it is trained, how well it finds, and the search itself.

Everything here can be made again from the rows. Scores are FAISS's with one sign: higher is nearer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from faiss import swig_ptr
from numpy.typing import NDArray

from mnemic.errors import UsageError
from mnemic.stores.base import Floats, Ids
from mnemic.stores.config import StoreConfig
from mnemic.stores.disk.columns import in_type

EXACT_BYTES = 1 << 26  # up to this much of float32 keys, every row is looked at
COMPRESSED_BYTES = 1 << 30  # from this much of float16 keys on, the index holds 4-bit codes in place of vectors
CACHED = 1 << 20  # numbers of keys that are scored at a time
SAMPLE = 64  # queries with which recall is measured
DEPTH = 32  # the rows of each that should be found
REFINEMENTS = (4, 16, 64)  # candidates looked at again with true distances, for each result asked for
MARGIN = 0.7  # of what lacks to 1: the store's own rows, with which recall is measured, are found better than others
POINTS_PER_LIST = 64  # rows that train a list

Nearest = tuple[Ids, Floats]  # (queries, k) each, best first; id -1 and score -inf where there is nothing
Searcher = Callable[[Floats], Nearest]
Selection = NDArray[np.bool_]  # by id: which rows may be found


def faiss_metric(config: StoreConfig) -> int:
    """FAISS's number of the metric; vectors are of length 1 already where it is the cosine."""
    return int(faiss.METRIC_L2 if config.metric == "l2" else faiss.METRIC_INNER_PRODUCT)


def choose(config: StoreConfig, rows: int) -> str:
    """The FAISS factory string for so many rows, or "" to look at every row."""
    if config.index not in ("auto", "exact"):
        return config.index if rows >= _rows_to_train(config) else ""
    if config.index == "exact" or rows * config.dim * 4 <= EXACT_BYTES:
        return ""
    lists = 2 ** int(math.log2(2 * math.sqrt(rows)))
    if rows * config.dim * 2 <= COMPRESSED_BYTES and config.keys != "codes":
        return f"IVF{lists},{'Flat' if config.keys == 'float32' else 'SQfp16'}"
    width = config.dim // 2 if config.transform == "pca" else config.dim
    parts = next(parts for parts in range(min(width // 2, 256) or 1, 0, -1) if width % parts == 0)
    before = {"": "", "opq": f"OPQ{parts},", "pca": f"PCA{width},"}[config.transform]
    return f"{before}IVF{lists},PQ{parts}x4fs"


def make(config: StoreConfig, factory: str) -> faiss.Index:
    """An empty index that takes ids."""
    try:
        index = faiss.index_factory(config.dim, factory, faiss_metric(config))
    except RuntimeError as error:
        reason = str(error).rpartition("Error: ")[2]
        raise UsageError(f"index = {factory!r}: FAISS cannot make it for {config.dim} dimensions ({reason})") from None
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if not isinstance(inner, faiss.IndexIVF) or not isinstance(index, faiss.IndexIVF | faiss.IndexPreTransform):
        raise UsageError(f"index = {factory!r}: expected auto, exact, or an inverted file as in 'IVF1024,PQ64x4fs'")
    return index


def lists_of(index: faiss.Index) -> int:
    """The number of lists of an inverted file."""
    return int(faiss.extract_index_ivf(index).nlist)


def _rows_to_train(config: StoreConfig) -> int:
    """Rows without which FAISS cannot train an index, or not well."""
    index = make(config, config.index)
    inverted = faiss.downcast_index(faiss.extract_index_ivf(index))
    entries = 2**inverted.pq.nbits if hasattr(inverted, "pq") else 1  # of a codebook
    return max(39 * inverted.nlist, entries, config.dim if isinstance(index, faiss.IndexPreTransform) else 1)


def training_rows(index: faiss.Index) -> int:
    """How many rows an index is trained on."""
    return max(POINTS_PER_LIST * lists_of(index), 1 << 14)


def train(index: faiss.Index, keys: Floats) -> None:
    """Trains an index; FAISS's warnings about few points are for those who did not choose their number."""
    inverted = faiss.downcast_index(faiss.extract_index_ivf(index))
    inverted.cp.niter, inverted.cp.min_points_per_centroid = 10, 1
    inverted.cp.max_points_per_centroid = POINTS_PER_LIST
    if hasattr(inverted, "pq"):
        inverted.pq.cp.min_points_per_centroid = 1
    if hasattr(inverted, "do_polysemous_training"):
        inverted.do_polysemous_training = False  # takes long, and is for a search that is not used here
    turn = faiss.downcast_VectorTransform(index.chain.at(0)) if isinstance(index, faiss.IndexPreTransform) else None
    if not isinstance(turn, faiss.OPQMatrix):
        index.train(keys)
        return
    codes = faiss.ProductQuantizer(turn.d_out, turn.M, 4)  # the turn is sought for the codes that will be used
    codes.cp.min_points_per_centroid = 1
    turn.pq = codes
    index.train(keys)
    turn.pq = None


def compressed(factory: str) -> bool:
    """Whether an index knows less of a vector than a float16 does, so that it pays to look again."""
    return "PQ" in factory.replace("OPQ", "") or "SQ4" in factory or "SQ8" in factory or "PCA" in factory


@dataclass
class Index:
    """A FAISS index with what was measured of it."""

    faiss: Any
    config: StoreConfig
    curve: list[list[float]]

    def __post_init__(self) -> None:
        self.lists, self.rows = lists_of(self.faiss), int(self.faiss.ntotal)
        self._dials: dict[tuple[float, int], tuple[int, int]] = {}
        self._refined: Any = None

    def dial(self, recall: float, k: int = DEPTH) -> tuple[int, int]:
        """(lists to look into, candidates per result) of the cheapest setting that reaches this recall; 1 is all.

        The lists of a setting that was measured with 32 results may hold too few rows for very many.
        """
        if (recall, k) not in self._dials:
            lists, refine = self._cheapest(recall)
            enough = min(-(-2 * k * self.lists // max(self.rows, 1)), self.lists)
            self._dials[recall, k] = max(lists, enough), refine
        return self._dials[recall, k]

    def candidates(self, k: int, refine: int) -> int:
        """How many rows to look at again for k results; the more results, the fewer for each."""
        results = max(k, DEPTH)
        return min(int(results * (1 + (refine - 1) / math.sqrt(results / DEPTH))), self.rows)

    def _cheapest(self, recall: float) -> tuple[int, int]:
        reaching = [step for step in self.curve if step[2] >= recall + MARGIN * (1 - recall)]
        if recall == 1 or not reaching:
            lists, refine, _ = max(self.curve, key=lambda step: (step[2], step[0]))
            return (self.lists if recall == 1 else int(lists)), int(refine)
        lists, refine, _ = min(reaching, key=self._cost)
        return int(lists), int(refine)

    def _cost(self, step: list[float]) -> float:
        """Bytes touched for 32 results: codes one after the other, and vectors here and there, which costs more."""
        lists, refine, _ = step
        scanned = lists * self.rows / self.lists * self.config.dim / 4
        return scanned + (refine * DEPTH * self.config.dim * 2 * 8 if refine > 1 else 0)

    def search(self, queries: Floats, k: int, lists: int, selection: Selection | None = None) -> Nearest:
        """The nearest rows by the index's own scores."""
        return self.searcher(k, lists, selection)(queries)

    def searcher(
        self, k: int, lists: int, selection: Selection | None = None, candidates: int = 0, keys: Any = None
    ) -> Searcher:
        """A search with these settings, without what FAISS's Python side makes and checks each time.

        With `candidates`, so many rows are compared once more by `keys`, an index of FAISS with rows numbered by id.
        """
        index = self.faiss
        if candidates:
            index = self._refined = self._refined or faiss.IndexRefine(self.faiss, keys)
        parameters = self._search_parameters(lists, selection, candidates / k)
        ask, negative = index.search_c, self.config.metric == "l2"

        def search(queries: Floats) -> Nearest:
            count = len(queries)
            scores, ids = np.empty((count, k), np.float32), np.empty((count, k), np.int64)
            ask(count, swig_ptr(queries), k, swig_ptr(scores), swig_ptr(ids), parameters)
            return ids, -scores if negative else scores

        return search

    def _search_parameters(self, lists: int, selection: Selection | None, factor: float) -> Any:
        chosen = (
            {"sel": faiss.IDSelectorBitmap(np.packbits(selection, bitorder="little"))} if selection is not None else {}
        )
        made = faiss.SearchParametersIVF(nprobe=min(lists, self.lists), **chosen)
        if isinstance(self.faiss, faiss.IndexPreTransform):
            made = faiss.SearchParametersPreTransform(index_params=made)
        if factor:
            made = faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=made)
        return made


class Exact:
    """A few rows in memory, all of which are looked at."""

    def __init__(self, config: StoreConfig, parts: Iterable[tuple[Ids, Floats]]) -> None:
        self.config = config
        self._index = faiss.IndexFlat(config.dim, faiss_metric(config))
        ids = [np.empty(0, np.int64)]
        for some, keys in parts:
            ids.append(some)
            self._index.add(np.ascontiguousarray(keys))
        self.ids = np.concatenate(ids)

    def search(self, queries: Floats, k: int) -> Nearest:
        """The nearest of these rows."""
        scores, rows = self._index.search(queries, min(k, max(len(self.ids), 1)))
        if self.config.metric == "l2":
            np.negative(scores, out=scores)
        return (np.where(rows >= 0, self.ids[rows], -1) if len(self.ids) else rows), scores


def look_at_all(config: StoreConfig, parts: Iterable[tuple[Ids, Floats]], queries: Floats, k: int) -> Nearest:
    """The nearest rows among any number of them, read piece by piece."""
    ids, scores = np.full((len(queries), 0), -1), np.empty((len(queries), 0), np.float32)
    for some, keys in parts:
        found, rows = faiss.knn(queries, np.ascontiguousarray(keys), min(k, len(some)), metric=faiss_metric(config))
        if config.metric == "l2":
            np.negative(found, out=found)
        ids, scores = best_of([(ids, scores), (np.where(rows < 0, -1, some[rows]), found)], k)
    return ids, scores


def best_of(parts: list[Nearest], k: int) -> Nearest:
    """The k best of several answers; of equal ones the lowest id."""
    ids, scores = (np.concatenate(columns, 1) for columns in zip(*parts, strict=True))
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)


def top(ids: Ids, scores: Floats, k: int) -> Nearest:
    """The k best of many candidates."""
    if k < ids.shape[1]:
        part = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        ids, scores = np.take_along_axis(ids, part, 1), np.take_along_axis(scores, part, 1)
    return best_of([(ids, scores)], k)


def true_scores(
    config: StoreConfig, queries: Floats, count: int, keys_of: Callable[[int, int], NDArray[Any]]
) -> Floats:
    """Scores (queries, count) of candidates; `keys_of` gives the keys of those from a start to an end."""
    scores = np.empty((len(queries), count), np.float32)
    step = max(1, CACHED // (count * config.dim))
    places = np.arange(step * count)
    compare = faiss.fvec_L2sqr_by_idx if config.metric == "l2" else faiss.fvec_inner_products_by_idx
    for start in range(0, len(queries), step):
        some, out = queries[start : start + step], scores[start : start + step]
        keys = in_type(keys_of(start * count, (start + len(some)) * count), np.float32)
        pointers = (swig_ptr(array) for array in (out, some, keys, places))
        compare(*pointers, config.dim, len(some), count)
    return np.negative(scores, out=scores) if config.metric == "l2" else scores


def pair_scores(config: StoreConfig, queries: Floats, asking: Ids, keys: Floats, which: Ids) -> Floats:
    """The score of each pair n: query `asking[n]` and key `which[n]`."""
    scores = np.empty(len(asking), np.float32)
    compare = faiss.pairwise_indexed_L2sqr if config.metric == "l2" else faiss.pairwise_indexed_inner_product
    compare(config.dim, len(asking), *map(swig_ptr, (queries, asking, keys, which, scores)))
    return np.negative(scores, out=scores) if config.metric == "l2" else scores


def nth_best(config: StoreConfig, parts: Iterable[tuple[Ids, Floats]], ids: Ids, keys: Floats, depth: int) -> Floats:
    """For some rows, the score of the n-th nearest of all rows but themselves: one product with each part."""
    import torch

    distance = config.metric == "l2"
    best = torch.full((depth, len(ids)), torch.finfo(torch.float32).min)
    columns = torch.from_numpy(2 * keys if distance else keys).T
    for some, others in parts:
        rows = torch.from_numpy(np.require(others, requirements="W"))
        scores = rows @ columns
        if distance:
            scores -= torch.linalg.vecdot(rows, rows)[:, None]
        place = np.searchsorted(some, ids).clip(max=len(some) - 1)
        own = np.flatnonzero(some[place] == ids)
        scores[place[own], own] = -torch.inf
        better = (scores - best[-1]).amax(1) > 0
        best = torch.cat([best, scores[better]]).topk(depth, 0).values
    lowest = best[-1].numpy()
    return lowest - np.einsum("nd,nd->n", keys, keys) if distance else lowest


def measure(
    index: Index,
    queries: tuple[Ids, Floats],
    truth: Floats,
    rescored: Callable[[Floats, Ids], Floats],
    refinements: tuple[int, ...],
    depth: int = DEPTH,
) -> list[list[float]]:
    """The recall at 32 of ever more lists, and of more candidates where that is not enough: [lists, refine, recall].

    queries: rows of the store, whose own id does not count; truth: the score of the last row that should be found.
    rescored: the true scores of candidates. A found row counts if it is truly as near as that one.
    """
    curve: list[list[float]] = []
    most = index.lists
    for refine in refinements:
        lists = 1
        while True:
            ids, _ = index.search(queries[1], (depth + 1) * refine, lists)
            scores = rescored(queries[1], ids)
            scores[(ids < 0) | (ids == queries[0][:, None])] = -np.inf
            best = -np.sort(-scores, 1)[:, :depth]
            tolerance = 1e-5 * np.abs(truth) + 1e-6 * (1 + np.einsum("nd,nd->n", queries[1], queries[1]))  # float32's
            reached = float((best >= (truth - tolerance)[:, None]).mean())
            gained = reached - curve[-1][2] if lists > 1 else 1.0
            curve.append([lists, refine, round(reached, 4)])
            if reached >= 0.9995:
                return curve
            if lists >= most or (gained < 0.001 and reached > 0.5):  # more candidates are needed, not more lists
                break
            lists = min(lists * 2, most)
    return curve
