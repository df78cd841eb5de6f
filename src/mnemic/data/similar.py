"""Batches for training with an external memory: each is packed with segments that have many words in common.

As in "Training Language Models with Memory Augmentation" (arXiv:2205.12674), section 4.3 and Algorithm 1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tqdm import tqdm

from mnemic.data.shuffle import shuffled
from mnemic.data.streams import IGNORED, check_settings, empty_batch
from mnemic.data.tokenized import TokenizedCorpus
from mnemic.errors import UsageError
from mnemic.files import write_bytes

if TYPE_CHECKING:
    import torch

NOBODY = -1

log = logging.getLogger(__name__)


class SimilarSegments:
    """An endless (or with `epochs` finite) iterator of batches whose rows have many words in common.

    The documents, one after the other, are cut into segments of `segment_length` tokens. A chain is laid through all of
    them, anew for each epoch: it starts at a random segment and goes on to that of the `k` most similar by BM25 which
    is the best not yet in the chain, or to another random one if all of them are. Each `batch_size` segments of the
    chain are a batch, and the batches come in random order. `shuffled` puts a random order in place of the chain.

    A batch has the form that DocumentStreams gives. Within an epoch each token is read exactly once; what the last
    segment and the last batch of the chain lack is padding. Each row starts afresh, so `document_starts` is True at its
    first token. With several processes (`rank`, `world_size`) the rows of all of them form one large batch of similar
    segments, of which each gives its own rows.

    The search takes much longer than all else; in `folder` its result is kept and used again.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        batch_size: int,
        segment_length: int,
        seed: int = 0,
        k: int = 20,
        shuffled: bool = False,
        epochs: int | None = None,
        folder: str | Path | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        sizes = {"batch_size": batch_size, "segment_length": segment_length, "k": k, "world_size": world_size}
        check_settings(epochs, rank, **sizes)
        self.corpus = corpus
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.seed = seed
        self.k = k
        self.shuffled = shuffled
        self.epochs = epochs
        self.segments = Segments(corpus, segment_length)
        self._first_row = rank * batch_size
        self._row_count = batch_size * world_size
        self._ends = np.cumsum([corpus.length(document) for document in range(len(corpus))])
        self._neighbours = np.full((len(self.segments), 1), NOBODY) if shuffled else self._find_neighbours(folder)
        self._epoch, self._chain = -1, np.empty(0, np.int64)
        self._next = 0

    @property
    def batches_per_epoch(self) -> int:
        """How many batches it takes to read the corpus once."""
        return -(-len(self.segments) // self._row_count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        import torch

        epoch, number = divmod(self._next, self.batches_per_epoch)
        if epoch == self.epochs:
            raise StopIteration
        if epoch != self._epoch:
            self._epoch, self._chain = epoch, self._lay_chain(epoch)
        self._next += 1
        batch = empty_batch(self.batch_size, self.segment_length, self.corpus.end_token)
        place = shuffled(number, self.batches_per_epoch, self.seed, 2 * epoch + 1)
        whole = self._chain[place * self._row_count : (place + 1) * self._row_count]
        for row, segment in enumerate(whole[self._first_row : self._first_row + self.batch_size].tolist()):
            self._write(segment, {name: values[row] for name, values in batch.items()})
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _lay_chain(self, epoch: int) -> np.ndarray:
        """The segments in the order of an epoch, before its batches are shuffled."""
        count = len(self.segments)
        return chain(self._neighbours, (shuffled(place, count, self.seed, 2 * epoch) for place in range(count)))

    def _write(self, segment: int, row: dict[str, np.ndarray]) -> None:
        first, stop = self.segments.span(segment)
        tokens = self.corpus.tokens[first : stop + 1]
        row["input_ids"][: stop - first] = tokens[: stop - first]
        row["targets"][: len(tokens) - 1] = tokens[1:]
        row["attention_mask"][: stop - first] = 1
        ends = self._ends[np.searchsorted(self._ends, first, "right") : np.searchsorted(self._ends, stop, "right")]
        row["targets"][ends - first - 1] = IGNORED
        row["document_starts"][0] = True
        row["document_starts"][ends[ends < stop] - first] = True

    def _find_neighbours(self, folder: str | Path | None) -> np.ndarray:
        """The similar segments of each segment, from the folder if they are there."""
        path = None if folder is None else Path(folder) / f"similar-{self.segment_length}-{self.k}.safetensors"
        made_from = {"corpus": self.corpus.fingerprint, "segment_length": str(self.segment_length), "k": str(self.k)}
        return kept_similar(path, made_from, self.segments, self.corpus.vocab_size, self.k)

    def state_dict(self) -> dict[str, Any]:
        """How many batches were read, the same on every rank; the next batch after loading it is the next one now."""
        return {**self._identity(), "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken, refused if corpus or settings are others."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UsageError(
                    f"the stream was saved with {name} = {state.get(name)!r} and has {value!r} now: "
                    f"resume with the same corpus and settings"
                )
        self._next = state["next"]

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus.fingerprint,
            "row_count": self._row_count,
            "segment_length": self.segment_length,
            "seed": self.seed,
            "k": self.k,
            "shuffled": self.shuffled,
            "epochs": self.epochs,
        }


class Segments:
    """The documents of a corpus, one after the other, cut into lists of `length` tokens, read one at a time."""

    def __init__(self, corpus: TokenizedCorpus, length: int) -> None:
        self.corpus = corpus
        self.length = length

    def __len__(self) -> int:
        return -(-len(self.corpus.tokens) // self.length)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.corpus.tokens[slice(*self.span(number))].tolist() for number in range(len(self)))

    def span(self, number: int) -> tuple[int, int]:
        """Where in the corpus' tokens a segment starts and stops."""
        first = number * self.length
        return first, min(first + self.length, len(self.corpus.tokens))


def chain(neighbours: np.ndarray, starts: Iterable[int]) -> np.ndarray:
    """Algorithm 1: the order in which each segment is followed by the best of its neighbours that is still left.

    Row i of `neighbours` are those of segment i, the best first, filled up with -1. `starts` are all segments in random
    order: where none of the neighbours is left, the chain goes on at the first start that is.
    """
    left = np.ones(len(neighbours) + 1, np.bool_)
    left[NOBODY] = False  # the last place is that of no segment
    order = []
    for segment in starts:
        while left[segment]:
            order.append(segment)
            left[segment] = False
            near = neighbours[segment]
            segment = near[left[near].argmax()]  # the first if none is left, which ends the loop
    return np.array(order, np.int64)


def kept_similar(
    path: Path | None,
    made_from: dict[str, str],
    segments: Segments | Sequence[Sequence[int]],
    vocab_size: int,
    k: int,
) -> np.ndarray:
    """What `find_similar` finds; kept in a file, if a path is given, and read from there if it is of the same."""
    if path is None:
        return find_similar(segments, vocab_size, k)
    neighbours = _kept(path, made_from)
    if neighbours is None:
        neighbours = find_similar(segments, vocab_size, k)
        write_bytes(path, save({"neighbours": neighbours}, {**made_from, "checksum": _checksum(neighbours)}))
    return neighbours


def find_similar(segments: Segments | Sequence[Sequence[int]], vocab_size: int, k: int = 20) -> np.ndarray:
    """Of each segment, the numbers of the `k` others most similar by BM25, the best first, filled up with -1.

    Terms are token ids, each as often as it occurs. One in half of the segments or more weighs nothing (Robertson's
    weight), and segments that share no term of weight are not similar.
    """
    import bm25s

    index = bm25s.BM25(method="robertson", int_dtype="int64")  # numpy adds at such places without copying them
    index.scores = index.build_index_from_ids(range(vocab_size), segments, show_progress=False)
    weighs = np.diff(index.scores["indptr"]) * 2 < len(segments)
    similar = np.full((len(segments), k), NOBODY, np.int32)
    for number, segment in enumerate(tqdm(segments, "similar segments", unit="segment", delay=2, disable=None)):
        terms = np.array(segment)
        scores = index.get_scores_from_ids(terms[weighs[terms]])
        scores[number] = 0
        best = _best(scores, k)
        similar[number, : len(best)] = best
    return similar


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """The places of the k highest scores above zero, the highest first, of equal ones the first."""
    places = np.flatnonzero(scores > 0)
    if len(places) > k:
        least = np.partition(scores[places], -k)[-k]
        places = places[scores[places] >= least]
    return places[np.argsort(-scores[places], kind="stable")][:k]


def _kept(path: Path, made_from: dict[str, str]) -> np.ndarray | None:
    """The similar segments in a file, if they are whole and of the same segments."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            neighbours, record = file.get_tensor("neighbours"), file.metadata()
    except (OSError, SafetensorError) as error:
        log.warning("%s cannot be read (%s): the similar segments are searched for again", path, error)
        return None
    if record != {**made_from, "checksum": _checksum(neighbours)}:
        log.warning("%s is damaged or of another corpus: the similar segments are searched for again", path)
        return None
    return neighbours


def _checksum(neighbours: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(neighbours.tobytes())
