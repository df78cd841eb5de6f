"""What every store can do, and the words for it: rows and references, where to look, what was found.

A row is a key (a vector), a value (a token) and a reference (a document and a position in it). A document belongs to a
namespace. Rows get the numbers 0, 1, 2, ... in the order in which they are added, and keep them for good.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mnemic.errors import UsageError
from mnemic.stores.config import StoreConfig

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

DEFAULT_NAMESPACE = "default"
HIGHEST_POSITION = 2**32 - 1
MOST = 1 << 24  # results of one query
HIGHEST_HALF = 65504  # the largest number of float16
LOOKED_UP = 1 << 20  # numbers of keys that are held at a time to score rows


class Source(NamedTuple):
    """A document that rows refer to, and whom it belongs to."""

    document: str
    namespace: str = DEFAULT_NAMESPACE


@dataclass(frozen=True)
class References:
    """Where rows come from: row i is at `positions[i]` of `sources[which[i]]`."""

    sources: Sequence[Source]
    which: NDArray[np.int64]
    positions: NDArray[np.int64]

    @classmethod
    def of(cls, document: str, positions: Any, namespace: str = DEFAULT_NAMESPACE) -> Self:
        """References to positions of one document."""
        positions = np.atleast_1d(np.asarray(positions))
        return cls([Source(document, namespace)], np.zeros(len(positions), np.int64), positions)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, row: int) -> tuple[Source, int]:
        return self.sources[int(self.which[row])], int(self.positions[row])


@dataclass(frozen=True)
class Rows:
    """Rows as they are stored; `keys` is None where a store keeps none."""

    keys: Floats | None
    values: NDArray[np.int64]
    references: References


class Found(NamedTuple):
    """The nearest rows of each query, best first: arrays of (queries, k).

    `mask` is true where a row was found. Where there were fewer than k, the score is -inf (no weight in a softmax) and
    id and value are 0 and mean nothing. A higher score is nearer: the inner product, the cosine, or minus the squared
    distance.
    """

    ids: Ids
    scores: Floats
    values: NDArray[np.int64]
    mask: NDArray[np.bool_]


class LookedUp(NamedTuple):
    """Of numbers of rows, which are `there` (n,), and the keys and values of those."""

    there: NDArray[np.bool_]
    keys: NDArray[Any]
    values: NDArray[np.int64]


def _names(names: Any, what: str) -> frozenset[str] | None:
    """One name or several as a set of them."""
    if names is None or isinstance(names, frozenset):
        return names
    if isinstance(names, str):
        return frozenset([names])
    if isinstance(names, Source) or not isinstance(names, Iterable):
        raise UsageError(f"{what} = {names!r}: expected names; for one document, Where.document(name, namespace)")
    return frozenset(names)


@dataclass(frozen=True)
class Where:
    """Which rows are meant: those of these namespaces and of these documents; None means any."""

    namespaces: frozenset[str] | None = None
    documents: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for name in ("namespaces", "documents"):
            object.__setattr__(self, name, _names(getattr(self, name), name))

    @classmethod
    def of(cls, where: Where | str | Iterable[str] | None) -> Where:
        """A namespace or several, as plain texts, or a `Where` as it is."""
        if isinstance(where, Where):
            return where
        return cls(where)  # type: ignore[arg-type]

    @classmethod
    def document(cls, document: str, namespace: str = DEFAULT_NAMESPACE) -> Where:
        """The rows of one document."""
        return cls(frozenset([namespace]), frozenset([document]))

    @property
    def everything(self) -> bool:
        """Whether no row is left out."""
        return self.namespaces is None and self.documents is None

    def __contains__(self, source: Source) -> bool:
        return (self.namespaces is None or source.namespace in self.namespaces) and (
            self.documents is None or source.document in self.documents
        )


EVERYTHING = Where()


@dataclass(frozen=True)
class Summary:
    """What a store says of itself: the part of its manifest that all kinds of stores have."""

    address: str
    version: int
    rows: int
    documents: int
    namespaces: dict[str, int]  # rows of each
    config: StoreConfig
    index: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0


class Store(ABC):
    """The contract. Rows added or deleted are seen and durable from the `commit` on, not before."""

    address: str
    config: StoreConfig
    closed = False
    overridden: tuple[str, ...] = ()  # what was not compared when it was opened: model, tokenizer

    def add(self, keys: Any, values: Any, references: References) -> Ids:
        """Takes in rows: keys (n, dim), values (n,), references (n). Returns their numbers."""
        self._check_open()
        if not isinstance(references, References):
            raise UsageError(f"references of type {type(references).__name__}: give References, as References.of(...)")
        keys = self._vectors(keys, "keys")
        if self.config.keys != "float32" and len(keys) and max(keys.max(), -keys.min()) > HIGHEST_HALF:
            raise UsageError(f"keys hold numbers beyond {HIGHEST_HALF}, too large for float16: use keys = 'float32'")
        values = _whole_numbers(values, "values", len(keys), 2**31 - 1)
        positions = _whole_numbers(references.positions, "positions", len(keys), HIGHEST_POSITION)
        sources = [_source(source) for source in references.sources]
        which = _whole_numbers(references.which, "document numbers", len(keys), len(sources) - 1)
        if not len(keys):
            return np.empty(0, np.int64)
        return self._add(keys, values, References(sources, which, positions))

    def search(
        self, queries: Any, k: int, where: Where | str | Iterable[str] | None = None, recall: float | None = None
    ) -> Found:
        """The `k` nearest rows of each query, confined to namespaces or documents; `recall` is the dial for speed."""
        if self.closed:
            self._check_open()
        queries = self._vectors(queries, "queries")
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 0 < k <= MOST:
            raise UsageError(f"k = {k!r}: expected a whole number from 1 to {MOST}")
        if recall is not None and not (isinstance(recall, float | int) and 0 < recall <= 1):
            raise UsageError(f"recall = {recall!r}: expected a number above 0 and up to 1")
        if not len(queries):
            return nothing(0, int(k))
        where = EVERYTHING if where is None else Where.of(where)
        return self._search(queries, int(k), where, recall or self.config.recall)

    def score(self, queries: Any, ids: Any, where: Where | str | Iterable[str] | None = None) -> Found:
        """What `search` says of these rows: ids (queries, k), whose order is kept; a negative one stands for no row.

        `mask` is false where no row has that number, it was deleted, or `where` does not mean it.
        """
        self._check_open()
        queries, ids = self._vectors(queries, "queries"), np.asarray(ids)
        if ids.ndim != 2 or len(ids) != len(queries) or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(
                f"ids of shape {ids.shape} and type {ids.dtype}: expected whole numbers ({len(queries)}, k), the rows "
                "of each query"
            )
        if self.config.keys == "codes":
            raise UsageError(f"{self.address} keeps no keys to score rows by: build it with keys = 'float16'")
        return self._score(queries, ids.astype(np.int64), EVERYTHING if where is None else Where.of(where))

    def _score(self, queries: Floats, ids: Ids, where: Where) -> Found:
        """Looks up each row once, some at a time and in their order, and compares it with all that ask for it."""
        found, asked = nothing(*ids.shape), ids.reshape(-1)
        places = np.flatnonzero(asked >= 0)
        places = places[np.argsort(asked[places])]
        rows, counts = np.unique(asked[places], return_counts=True)
        firsts = np.cumsum(counts) - counts
        step = max(1, LOOKED_UP // self.config.dim)
        for start in range(0, len(rows), step):
            times = counts[start : start + step]
            there, keys, values = self._look_up(rows[start : start + step], where)
            here = places[firsts[start] : firsts[start] + times.sum()][np.repeat(there, times)]
            if len(here):
                which = np.repeat(np.arange(len(values)), times[there])
                np.put(found.ids, here, asked[here])
                np.put(found.scores, here, self._compare(queries, here // ids.shape[1], keys, which))
                np.put(found.values, here, values[which])
                np.put(found.mask, here, True)
        return found

    def _compare(self, queries: Floats, asking: Ids, keys: NDArray[Any], which: Ids) -> Floats:
        """The score of each pair n: query `asking[n]` and key `which[n]`."""
        scores = np.empty(len(asking), np.float32)
        step = max(1, LOOKED_UP // self.config.dim)
        for start in range(0, len(asking), step):
            some = slice(start, start + step)
            left, right = queries[asking[some]], keys[which[some]]
            if self.config.metric == "l2":
                left = right = left - right
            scores[some] = np.einsum("nd,nd->n", left, right)
        return np.negative(scores, out=scores) if self.config.metric == "l2" else scores

    def get(self, ids: Any) -> Rows:
        """The rows of these numbers; a number that no row has, or whose row was deleted, is an error."""
        self._check_open()
        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(f"ids of shape {ids.shape} and type {ids.dtype}: expected a list of whole numbers")
        return self._get(ids.astype(np.int64))

    def rows(self, where: Where | str | Iterable[str] | None = None, block: int = 4096) -> Iterator[LookedUp]:
        """All rows there are, in order, block by block; of what is looked up by number, `there` says which exist."""
        self._check_open()
        for first in range(0, self.next_id, block):
            yield self._look_up(np.arange(first, min(first + block, self.next_id)), Where.of(where))

    @abstractmethod
    def _add(self, keys: Floats, values: NDArray[np.int64], references: References) -> Ids: ...

    @abstractmethod
    def _search(self, queries: Floats, k: int, where: Where, recall: float) -> Found: ...

    @abstractmethod
    def _look_up(self, ids: Ids, where: Where) -> LookedUp:
        """Rows that are meant, of different numbers from 0 on, which need not exist."""

    @abstractmethod
    def _get(self, ids: Ids) -> Rows: ...

    def delete(self, where: Where | str | Iterable[str]) -> int:
        """Takes out rows, those not committed yet included; returns how many. `compact` removes their last traces."""
        self._check_open()
        if where is None:
            raise UsageError("delete(None): say which rows are meant, as a namespace or Where(...); Where() is all")
        return self._delete(Where.of(where))

    @abstractmethod
    def _delete(self, where: Where) -> int: ...

    @abstractmethod
    def commit(self, index: bool = True) -> int:
        """Makes what was added and deleted durable and visible; returns the version. `index=False` leaves the index."""

    @abstractmethod
    def compact(self, progress: Callable[[int, int], None] | None = None, rebuild: bool = False) -> int:
        """Rewrites the store without deleted rows and old versions: nothing of them is in any file afterwards.

        `rebuild` makes the index anew as well.
        """

    @abstractmethod
    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Looks at everything that is stored; what is wrong, one sentence each."""

    @abstractmethod
    def refresh(self) -> int:
        """Turns to the newest version that anyone has committed, and returns it."""

    @abstractmethod
    def summary(self) -> Summary:
        """Counts, settings, origin and index."""

    def close(self) -> None:
        """Lets go of files, locks and connections; what was not committed is dropped."""
        self.closed = True
        self._close()

    @abstractmethod
    def _close(self) -> None: ...

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError(f"the store {self.address} is closed: open it again")

    @property
    @abstractmethod
    def next_id(self) -> int:
        """The number of the next row to be committed: how many rows there ever were."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows that can be found."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _vectors(self, vectors: Any, what: str) -> Floats:
        """Vectors (n, dim) in float32, checked, and of length 1 where the metric is the cosine."""
        if not isinstance(vectors, np.ndarray) and hasattr(vectors, "detach"):  # a torch tensor
            vectors = vectors.detach().float().cpu().numpy()  # numpy has no bfloat16
        try:
            vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        except (TypeError, ValueError):
            raise UsageError(f"{what} are no numbers: expected an array (n, {self.config.dim})") from None
        if vectors.ndim != 2 or vectors.shape[1] != self.config.dim:
            raise UsageError(f"{what} of shape {vectors.shape}: expected (n, {self.config.dim}), a vector in each row")
        if not math.isfinite(np.vdot(vectors, vectors)):  # a fast first look: undefined if any number is
            if not np.isfinite(vectors).all():
                raise UsageError(f"{what} hold infinite or undefined numbers: look where they come from")
            if self.config.metric != "cosine" and not np.isfinite(np.einsum("nd,nd->n", vectors, vectors)).all():
                raise UsageError(f"{what} are too large to be compared in float32: scale them down")
        if self.config.metric == "cosine":
            lengths = np.abs(vectors).max(1, keepdims=True)  # first: the squares of what is far from 1 are not exact
            if not lengths.all():
                raise UsageError(
                    f"{what} hold a zero vector, which has no direction: leave it out or use another metric"
                )
            vectors = vectors / lengths
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


def nothing(queries: int, k: int) -> Found:
    """What a search finds in an empty store."""
    shape = (queries, k)
    return Found(
        np.zeros(shape, np.int64),
        np.full(shape, -np.inf, np.float32),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.bool_),
    )


def _whole_numbers(numbers: Any, what: str, count: int, highest: int) -> NDArray[np.int64]:
    if hasattr(numbers, "detach"):
        numbers = numbers.detach().cpu().numpy()
    numbers = np.asarray(numbers)
    if numbers.shape != (count,) or (count and numbers.dtype.kind not in "iu"):
        raise UsageError(
            f"{what} of shape {numbers.shape} and type {numbers.dtype}: expected {count} whole numbers, one a key"
        )
    if count and (numbers.min() < 0 or numbers.max() > highest):
        raise UsageError(f"{what} from {numbers.min()} to {numbers.max()}: expected numbers from 0 to {highest}")
    return numbers.astype(np.int64)


def _source(source: Source) -> Source:
    source = Source(*source)
    for text, what in ((source.document, "document name"), (source.namespace, "namespace")):
        if not isinstance(text, str) or not 0 < len(text.encode("utf-8", "replace")) <= 4096:
            raise UsageError(f"{what} {str(text)[:80]!r}: expected a text of 1 to 4096 bytes")
        if "\x00" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError(f"{what} {text!r}: holds characters that cannot be stored")
    return source
