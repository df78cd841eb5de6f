"""Batches for training with a long-term memory: each holds several consecutive segments of every stream.

As in "Training Language Models with Memory Augmentation" (arXiv:2205.12674), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mnemic.data.streams import DocumentStreams
from mnemic.data.tokenized import TokenizedCorpus
from mnemic.errors import UsageError

if TYPE_CHECKING:
    import torch


class ConsecutiveSegments:
    """Document streams of which each batch has `consecutive` segments (m in the paper), one in a row.

    Rows 0 to m - 1 are the segments of the first stream in order, the next m rows those of the second, and so on: row r
    is of stream r // m, which `streams` says, and continues row r - 1 if that is of the same stream; the first row of a
    stream continues its last one of the batch before. `document_starts` is True only where a document really starts.
    Otherwise it is as DocumentStreams with batch_size / m rows of m * segment_length tokens.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        batch_size: int,
        segment_length: int,
        consecutive: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or segment_length < 1:
            raise UsageError(f"batch_size = {batch_size}, segment_length = {segment_length}: expected at least 1")
        if consecutive < 1 or batch_size % consecutive:
            raise UsageError(
                f"consecutive = {consecutive}: expected a number that divides the {batch_size} rows of a batch"
            )
        self.corpus = corpus
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.consecutive = consecutive
        self._streams = DocumentStreams(
            corpus,
            batch_size // consecutive,
            segment_length * consecutive,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        import torch

        shape = self.batch_size, self.segment_length
        batch = {name: tensor.view(shape) for name, tensor in next(self._streams).items()}
        return {**batch, "streams": torch.arange(self.batch_size) // self.consecutive}

    def state_dict(self) -> dict[str, Any]:
        """Where every stream of every rank stands; the next batch after loading it is the next one now."""
        return {**self._streams.state_dict(), "consecutive": self.consecutive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken, refused if corpus or settings are others."""
        if state.get("consecutive") != self.consecutive:
            raise UsageError(
                f"the stream was saved with consecutive = {state.get('consecutive')!r} and has {self.consecutive!r} "
                f"now: resume with the same corpus and settings"
            )
        self._streams.load_state_dict(state)
