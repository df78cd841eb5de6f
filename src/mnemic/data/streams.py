"""Batches for training: each row reads its own document, segment after segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mnemic.data.shuffle import shuffled
from mnemic.data.tokenized import TokenizedCorpus
from mnemic.errors import UsageError

if TYPE_CHECKING:
    import torch

IGNORED = -100


class _Stretch(NamedTuple):
    """What a row reads in one go: tokens `start` to `stop` of a document."""

    document: int
    start: int
    stop: int


def check_settings(epochs: int | None, rank: int, **sizes: int) -> None:
    """Refuses settings of batches that cannot be; `world_size` is one of the sizes."""
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} = {value}: expected at least 1")
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs = {epochs}: expected at least 1, or None for an endless stream")
    if not 0 <= rank < sizes["world_size"]:
        raise UsageError(f"rank = {rank}: expected 0 to {sizes['world_size'] - 1} in a world of {sizes['world_size']}")


def empty_batch(rows: int, length: int, end_token: int) -> dict[str, np.ndarray]:
    """Rows of padding, to be written to."""
    shape = rows, length
    return {
        "input_ids": np.full(shape, end_token, np.int64),
        "targets": np.full(shape, IGNORED, np.int64),
        "document_starts": np.zeros(shape, np.bool_),
        "attention_mask": np.zeros(shape, np.int64),
    }


class DocumentStreams:
    """An endless (or with `epochs` finite) iterator of batches in which each row reads one document after the other.

    A batch is a dict of tensors of shape (batch_size, segment_length):
        input_ids        tokens
        targets          the next token of the same document, -100 where there is none
        document_starts  True at the first token of a document, in mid-segment too
        attention_mask   0 where a row has run dry at the end of the last epoch, else 1

    Row b of a batch continues row b of the batch before; when its document ends, it goes on at once with the next one
    of the epoch's order, which `seed` shuffles anew for each epoch. Within an epoch each document is read exactly once.

    With several processes (`rank`, `world_size`) the rows of all of them form one large batch, of which each gives its
    own rows; the state is that of all rows, the same on every rank. An endless stream over fewer documents than rows
    cuts each document into equal stretches, marked like document starts, so that rows do not all read the same text.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        batch_size: int,
        segment_length: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_settings(epochs, rank, batch_size=batch_size, segment_length=segment_length, world_size=world_size)
        self.corpus = corpus
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self._own_rows = range(rank * batch_size, (rank + 1) * batch_size)
        count = batch_size * world_size
        self._cuts = 1 if epochs is not None else -(-count // len(corpus))
        self._next = 0
        # Of each row: the number of its stretch in reading order (-1: none), and how many tokens of it were read.
        self._rows: list[tuple[int, int]] = [(-1, 0)] * count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        import torch

        batch = empty_batch(self.batch_size, self.segment_length, self.corpus.end_token)
        filled = [self._fill(row, batch) for row in range(len(self._rows))]
        if not any(filled):
            raise StopIteration
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _fill(self, row: int, batch: dict[str, np.ndarray]) -> int:
        """Moves a row on by a segment, writes it if it is one of this rank's, and returns how many tokens it read."""
        own = row - self._own_rows.start if row in self._own_rows else None
        column = 0
        number, read = self._rows[row]
        while column < self.segment_length:
            stretch = self._stretch(number) if number >= 0 else None
            if stretch is None or stretch.start + read == stretch.stop:
                if self.epochs is not None and self._next == self.epochs * self._per_epoch:
                    number = -1
                    break
                number, read, self._next = self._next, 0, self._next + 1
                continue
            first = stretch.start + read
            count = min(self.segment_length - column, stretch.stop - first)
            if own is not None:
                tokens = self.corpus.slice(stretch.document, first, first + count + 1)
                _write(batch, own, column, tokens, count, starts=read == 0)
            column, read = column + count, read + count
        self._rows[row] = number, read
        return column

    @property
    def _per_epoch(self) -> int:
        return len(self.corpus) * self._cuts

    def _stretch(self, number: int) -> _Stretch:
        """The stretch that comes at place `number` in the reading order of all epochs."""
        epoch, place = divmod(number, self._per_epoch)
        if self.shuffle:
            place = shuffled(place, self._per_epoch, self.seed, epoch)
        document, cut = divmod(place, self._cuts)
        length = self.corpus.length(document)
        return _Stretch(document, length * cut // self._cuts, length * (cut + 1) // self._cuts)

    def state_dict(self) -> dict[str, Any]:
        """Where every row of every rank stands, ready for JSON; the next batch after loading it is the next one now."""
        return {**self._identity(), "next": self._next, "rows": [list(row) for row in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken, refused if corpus or settings are others."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UsageError(
                    f"the stream was saved with {name} = {state.get(name)!r} and has {value!r} now: "
                    f"resume with the same corpus and settings"
                )
        self._next = state["next"]
        self._rows = [(number, read) for number, read in state["rows"]]

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus.fingerprint,
            "row_count": len(self._rows),
            "segment_length": self.segment_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
        }


def _write(batch: dict[str, np.ndarray], row: int, column: int, tokens: np.ndarray, count: int, starts: bool) -> None:
    """Puts `count` tokens at `column`; `tokens` has one more where the document goes on, the last one's target."""
    batch["input_ids"][row, column : column + count] = tokens[:count]
    batch["targets"][row, column : column + len(tokens) - 1] = tokens[1:]
    batch["document_starts"][row, column] = starts
    batch["attention_mask"][row, column : column + count] = 1
