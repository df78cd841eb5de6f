"""Batches for evaluating models without a cache: overlapping windows in which each token is scored exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from mnemic.data.streams import IGNORED
from mnemic.data.tokenized import TokenizedCorpus
from mnemic.errors import UsageError

if TYPE_CHECKING:
    import torch


Window = tuple[int, int, int, int]
"""A document's number, its first token that is read, the first that is scored, and the end of both."""


class SlidingWindows:
    """Batches of windows over each document, in the form that DocumentStreams gives.

    The first window of a document scores all of its targets; each further one moves on by `stride` and scores only what
    is new, the rest (target -100) is context, `window - stride` tokens of it at least. Windows never reach over a
    document's end. Each row starts afresh, so `document_starts` is True at its first token. Shorter rows are padded on
    the right; which windows share a batch changes nothing else.
    """

    def __init__(self, corpus: TokenizedCorpus, window: int, stride: int, batch_size: int) -> None:
        if window < 1 or batch_size < 1:
            raise UsageError(f"window = {window}, batch_size = {batch_size}: expected at least 1")
        if not 1 <= stride <= window:
            raise UsageError(f"stride = {stride}: expected 1 to {window}, the window, so that no token is left out")
        self.corpus = corpus
        self.window = window
        self.stride = stride
        self.batch_size = batch_size

    def __len__(self) -> int:
        """The number of batches."""
        return -(-sum(1 for _ in self._windows()) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        windows = self._windows()
        while group := list(islice(windows, self.batch_size)):
            yield self.batch(group)

    def _windows(self) -> Iterator[Window]:
        for document in range(len(self.corpus)):
            yield from self.of_document(document)

    def of_document(self, document: int) -> Iterator[Window]:
        """The windows of one document in order."""
        inputs = self.corpus.length(document) - 1  # the end token predicts nothing
        scored, end = 0, min(self.window, inputs)
        while scored < inputs:
            yield document, max(0, end - self.window), scored, end
            scored, end = end, min(end + self.stride, inputs)

    def batch(self, group: list[Window]) -> dict[str, torch.Tensor]:
        """The batch of some windows."""
        import torch

        shape = len(group), max(end - start for _, start, _, end in group)
        inputs = np.full(shape, self.corpus.end_token, np.int64)
        targets = np.full(shape, IGNORED, np.int64)
        mask = np.zeros(shape, np.int64)
        starts = np.zeros(shape, np.bool_)
        starts[:, 0] = True
        for row, (document, start, scored, end) in enumerate(group):
            tokens = self.corpus.slice(document, start, end + 1)
            inputs[row, : end - start] = tokens[:-1]
            targets[row, scored - start : end - start] = tokens[scored - start + 1 :]
            mask[row, : end - start] = 1
        batch = {"input_ids": inputs, "targets": targets, "document_starts": starts, "attention_mask": mask}
        return {name: torch.from_numpy(values) for name, values in batch.items()}
