"""Batches that are planned an epoch at a time: which examples each has is known before any is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mnemic.data.shuffle import shuffled
from mnemic.errors import UsageError

if TYPE_CHECKING:
    import torch


class PlannedBatches(ABC):
    """An endless (or with `epochs` finite) iterator of batches; a subclass says which, and calls `begin` when ready."""

    seed: int
    shuffle: bool
    epochs: int | None

    def begin(self) -> None:
        """Goes to the first batch of the first epoch."""
        self._epoch, self._next = 0, 0
        self._batches = self.plan(0)

    @abstractmethod
    def plan(self, epoch: int) -> list[np.ndarray]:
        """The numbers of the examples of each batch of an epoch."""

    @abstractmethod
    def batch(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """This rank's rows of the batch of these examples."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to be gone on from."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._next == len(self._batches):
            if self._epoch + 1 == self.epochs:
                raise StopIteration
            self._epoch, self._next = self._epoch + 1, 0
            self._batches = self.plan(self._epoch)
        self._next += 1
        return self.batch(self._batches[self._next - 1])

    def state_dict(self) -> dict[str, Any]:
        """How many batches of which epoch were read, ready for JSON; the next one after loading it is the next now."""
        return {**self._identity(), "epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken, refused if corpus or settings are others."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UsageError(
                    f"the stream was saved with {name} = {state.get(name)!r} and has {value!r} now: "
                    f"resume with the same corpus and settings"
                )
        self._epoch, self._next = state["epoch"], state["next"]
        self._batches = self.plan(self._epoch)

    def _shuffled(self, count: int, draw: int) -> list[int]:
        return [shuffled(place, count, self.seed, draw) for place in range(count)]
