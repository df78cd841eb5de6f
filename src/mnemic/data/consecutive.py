"""Batches for training with a long-term memory: each holds several consecutive segments of a text.

As in "Training Language Models with Memory Augmentation" (arXiv:2205.12674), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mnemic.data.similar import SimilarSegments
from mnemic.data.streams import check_settings
from mnemic.data.tokenized import TokenizedCorpus
from mnemic.errors import UsageError

if TYPE_CHECKING:
    import torch


class ConsecutiveSegments:
    """Batches of stretches of text, drawn at random, each cut into `consecutive` segments (m in the paper): its rows.

    Rows 0 to m - 1 are the segments of the first stretch in order, the next m rows those of the second, and so on: row
    r is of stretch r // m, which `streams` says, and continues row r - 1 if that is of the same stretch. Otherwise it
    is as SimilarSegments with batch_size / m rows of m * segment_length tokens in random order: within an epoch each
    token is read exactly once. `document_starts` is True where a document starts in the midst of a stretch.

    Stretches are drawn rather than read on from batch to batch, as nothing remembers the batch before, and a model
    learns more from batches that differ.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        batch_size: int,
        segment_length: int,
        consecutive: int,
        seed: int = 0,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_settings(epochs, rank, batch_size=batch_size, segment_length=segment_length, world_size=world_size)
        if consecutive < 1 or batch_size % consecutive:
            raise UsageError(
                f"consecutive = {consecutive}: expected a number that divides the {batch_size} rows of a batch"
            )
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.consecutive = consecutive
        self._stretches = SimilarSegments(
            corpus,
            batch_size // consecutive,
            segment_length * consecutive,
            seed=seed,
            shuffled=True,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        import torch

        shape = self.batch_size, self.segment_length
        batch = {name: tensor.view(shape) for name, tensor in next(self._stretches).items()}
        batch["document_starts"][:: self.consecutive, 0] = False
        return {**batch, "streams": torch.arange(self.batch_size) // self.consecutive}

    def state_dict(self) -> dict[str, Any]:
        """How many batches were read, the same on every rank; the next batch after loading it is the next one now."""
        return {**self._stretches.state_dict(), "consecutive": self.consecutive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken, refused if corpus or settings are others."""
        if state.get("consecutive") != self.consecutive:
            raise UsageError(
                f"the stream was saved with consecutive = {state.get('consecutive')!r} and has {self.consecutive!r} "
                f"now: resume with the same corpus and settings"
            )
        self._stretches.load_state_dict(state)
