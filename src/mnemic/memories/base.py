"""The contract of a memory: what `augment` asks of each folder in `memories/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mnemic.memories.config import MemoryConfig

if TYPE_CHECKING:
    from mnemic.hf.anatomy import Places
    from mnemic.hf.entrance import Entrance


class Handle(nn.Module):
    """One memory in one model: its parameters, its run-time state, and the way back.

    `attach.py` of each memory defines a subclass named `Attached` and is found by it. Its parameters are the memory's
    parameters; everything it changes in the model it puts back in `detach`, and it is without effect while `switch`ed
    off.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def attach(cls, config: MemoryConfig, places: Places, entrance: Entrance) -> Handle:
        """Puts the memory into a model."""
        raise NotImplementedError(f"{cls.__name__} does not say how to attach")

    def switch(self, on: bool) -> None:
        """Makes the memory take part, or leaves the model exactly as its base."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to switch")

    def detach(self) -> None:
        """Takes the memory out of the model."""
        self.switch(False)

    def reset(self) -> None:
        """Forgets what was read so far."""

    def state(self) -> dict[str, torch.Tensor]:
        """What was read so far, as tensors to be saved; empty where there is nothing."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
