"""Batches of pairs for training and evaluating models that translate: pairs of similar length, padded on the right."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mnemic.data.pairs import Pair
from mnemic.data.planned import PlannedBatches
from mnemic.data.similar import chain, kept_similar
from mnemic.data.streams import IGNORED, check_settings
from mnemic.data.tokenized import TokenizedCorpus, tokenize_corpus
from mnemic.errors import DamagedError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

NOBODY = -1
Order = np.ndarray | Callable[[int], np.ndarray]
"""The numbers of all pairs in an order, or a function that gives them for each epoch."""

log = logging.getLogger(__name__)


class TokenizedPairs:
    """Pairs as token ids: document i of `source` and of `target` are the sides of pair i.

    A side ends with the end token, and begins with a start token if the tokenizer has one that is not its end token.
    """

    def __init__(self, source: TokenizedCorpus, target: TokenizedCorpus) -> None:
        if len(source) != len(target):
            raise DamagedError(f"there are {len(source)} sources and {len(target)} targets: tokenise the pairs again")
        self.source = source
        self.target = target
        self.fingerprint = source.fingerprint + target.fingerprint
        self.end_token = target.end_token
        self._first = int(source.slice(0, 0, 1)[0] == source.end_token)

    @classmethod
    def open(cls, folder: str | Path) -> TokenizedPairs:
        """Opens what `tokenize_pairs` wrote to a folder."""
        return cls(*(TokenizedCorpus(Path(folder) / side) for side in Pair._fields))

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of the source and of the target of a pair."""
        return self.source.slice(index, self._first, None), self.target.slice(index, self._first, None)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of the source and of the target of each pair, (N, 2)."""
        counts = [[side.length(index) for side in (self.source, self.target)] for index in range(len(self))]
        return np.array(counts, np.int64) - self._first

    @property
    def target_count(self) -> int:
        """How many tokens there are to predict: all of the targets."""
        return int(self.lengths[:, 1].sum())


def tokenize_pairs(
    read: Callable[[], Iterable[Pair]], tokenizer: PreTrainedTokenizerBase, folder: str | Path | None = None
) -> TokenizedPairs:
    """Tokenises the pairs that `read` gives, anew for each side, into a folder or into temporary files."""
    folders = (None, None) if folder is None else tuple(Path(folder) / side for side in Pair._fields)
    source = tokenize_corpus((pair.source for pair in read()), tokenizer, folders[0])
    with _target_mode(tokenizer):
        target = tokenize_corpus((pair.target for pair in read()), tokenizer, folders[1])
    return TokenizedPairs(source, target)


@contextlib.contextmanager
def _target_mode(tokenizer: Any) -> Iterator[None]:
    """For tokenizers that cut the two languages in different ways, as Marian's do."""
    if not hasattr(tokenizer, "_switch_to_target_mode"):
        yield
        return
    tokenizer._switch_to_target_mode()
    tokenizer._in_target_context_manager = True  # or each call would switch it back
    try:
        yield
    finally:
        tokenizer._in_target_context_manager = False
        tokenizer._switch_to_input_mode()


class PairBatches(PlannedBatches):
    """An endless (or with `epochs` finite) iterator of batches of pairs, padded on the right.

    A batch is a dict of tensors with a row for each pair:
        input_ids       (B, S)  the tokens of the source
        attention_mask  (B, S)  0 on padding, else 1
        targets         (B, T)  the tokens of the target, -100 on padding
        pair            (B,)    the number of the pair

    A batch has a multiple of `batch_size` rows: as many as make no more than batch_size x segment_length tokens of each
    side, padding included. A pair with more than segment_length tokens on a side is left out. Within an epoch each
    other pair is read exactly once; what the last batch lacks are rows without targets, of the pair -1.

    Pairs of the same length are put in a random order by `seed` and epoch, then pairs of similar length are batched
    together, and the batches come in random order. With an `order`, it says instead which pairs follow each other
    within batches. Without `shuffle` pairs and batches go from the shortest to the longest, or keep the `order`.

    With several processes (`rank`, `world_size`) the rows of all of them form one large batch, of which each gives its
    own rows; the state is the same on every rank.
    """

    def __init__(
        self,
        pairs: TokenizedPairs,
        batch_size: int,
        segment_length: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        order: Order | None = None,
    ) -> None:
        check_settings(epochs, rank, batch_size=batch_size, segment_length=segment_length, world_size=world_size)
        self.pairs = pairs
        self.segment_length = segment_length
        self.seed, self.shuffle, self.epochs = seed, shuffle, epochs
        self._rank, self._world_size = rank, world_size
        self._multiple = batch_size * world_size
        self._order = order
        self._fits = pairs.lengths.max(axis=1) <= segment_length
        if not self._fits.any():
            raise UsageError(
                f"no pair has {segment_length} tokens or less on both sides: set segment_length to more, "
                f"up to {pairs.lengths.max()}"
            )
        left_out = int((~self._fits).sum())
        if left_out and rank == 0 and epochs is None:  # once a run
            log.warning("%d of %d pairs are left out: longer than %d tokens", left_out, len(pairs), segment_length)
        self.begin()

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The numbers of the pairs of each batch of an epoch."""
        order = self._length_order(epoch) if self._order is None else self._given_order(epoch)
        order = order[self._fits[order]]
        batches = [order[cut] for cut in self._cuts(self.pairs.lengths[order].max(axis=1).tolist())]
        places = self._shuffled(len(batches), 2 * epoch + 1) if self.shuffle else range(len(batches))
        return [batches[place] for place in places]

    def _length_order(self, epoch: int) -> np.ndarray:
        """All pairs from the shortest to the longest."""
        count = len(self.pairs)
        order = np.array(self._shuffled(count, 2 * epoch) if self.shuffle else range(count), np.int64)
        source, target = self.pairs.lengths[order].T
        return order[np.lexsort((source, target, np.maximum(source, target)))]

    def _given_order(self, epoch: int) -> np.ndarray:
        order = np.asarray(self._order(epoch) if callable(self._order) else self._order)
        if not np.array_equal(np.sort(order), np.arange(len(self.pairs))):
            raise UsageError(f"the order of pairs: expected each number from 0 to {len(self.pairs) - 1} once")
        return order

    def _cuts(self, widths: list[int]) -> Iterator[slice]:
        """Cuts pairs of these widths (the longer side) into batches."""
        most, start = self._multiple * self.segment_length, 0
        while start < len(widths):
            stop, widest = start, 0
            while stop < len(widths) and (stop - start + 1) * max(widest, widths[stop]) <= most:
                widest, stop = max(widest, widths[stop]), stop + 1
            if stop - start > self._multiple:
                stop -= (stop - start) % self._multiple
            yield slice(start, stop)
            start = stop

    def batch(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """This rank's rows of the batch of these pairs, as wide as those of the others."""
        import torch

        rows = -(-len(numbers) // self._multiple) * self._multiple // self._world_size
        own = numbers[self._rank * rows : (self._rank + 1) * rows].tolist()
        longest_source, longest_target = self.pairs.lengths[numbers].max(axis=0).tolist()
        sources = np.full((rows, longest_source), self.pairs.end_token, np.int64)
        mask = np.zeros((rows, longest_source), np.int64)
        mask[:, 0] = 1  # a row without a pair has one token too: attention to nothing is not a number
        targets = np.full((rows, longest_target), IGNORED, np.int64)
        for row, number in enumerate(own):
            source, target = self.pairs[number]
            sources[row, : len(source)] = source
            mask[row, : len(source)] = 1
            targets[row, : len(target)] = target
        pair = np.array(own + [NOBODY] * (rows - len(own)), np.int64)
        batch = {"input_ids": sources, "attention_mask": mask, "targets": targets, "pair": pair}
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    @cached_property
    def _order_checksum(self) -> str | None:
        return None if self._order is None else xxhash.xxh3_128_hexdigest(self._given_order(0).tobytes())

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self.pairs.fingerprint,
            "row_count": self._multiple,
            "segment_length": self.segment_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
            "order": self._order_checksum,
        }


class SimilarPairs(PairBatches):
    """Batches of pairs whose targets have many words in common, for training with the rest of the batch as memory.

    As in "Training Language Models with Memory Augmentation" (arXiv:2205.12674), appendix C: Algorithm 1 lays a chain
    through the targets, anew for each epoch, as SimilarSegments does through segments. It is cut into batches, which
    come in random order. Pairs of any length share a batch, so there is more padding than in batches by length. In
    `folder` the result of the search is kept and used again.
    """

    def __init__(
        self,
        pairs: TokenizedPairs,
        batch_size: int,
        segment_length: int,
        seed: int = 0,
        k: int = 20,
        epochs: int | None = None,
        folder: str | Path | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_settings(epochs, rank, k=k, world_size=world_size)
        targets = [pairs[number][1].tolist() for number in range(len(pairs))]
        path = None if folder is None else Path(folder) / f"similar-targets-{k}.safetensors"
        made_from = {"corpus": pairs.target.fingerprint, "k": str(k)}
        self._neighbours = kept_similar(path, made_from, targets, pairs.target.vocab_size, k)
        options: dict[str, Any] = {"seed": seed, "epochs": epochs, "rank": rank, "world_size": world_size}
        super().__init__(pairs, batch_size, segment_length, order=self._chain, **options)

    def _chain(self, epoch: int) -> np.ndarray:
        """All pairs in the order of an epoch, before its batches are shuffled."""
        return chain(self._neighbours, self._shuffled(len(self.pairs), 2 * epoch))
