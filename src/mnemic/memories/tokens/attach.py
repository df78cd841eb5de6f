"""Memory tokens go before the input of the model's stack (of a sequence-to-sequence model: its encoder)."""

from __future__ import annotations

from typing import Self

import torch

from mnemic.hf.anatomy import Places
from mnemic.hf.entrance import Entrance, Prefix
from mnemic.memories.base import Handle
from mnemic.memories.tokens.config import MemoryTokens
from mnemic.memories.tokens.layer import MemoryTokenLayer


class Attached(Handle):
    """Memory tokens in one model."""

    def __init__(self, config: MemoryTokens, layer: MemoryTokenLayer, entrance: Entrance) -> None:
        super().__init__(config)
        self.layer = layer
        self._entrance = entrance
        self.switch(True)

    @classmethod
    def attach(cls, config: MemoryTokens, places: Places, entrance: Entrance) -> Self:  # type: ignore[override]
        inputs = places.sample_inputs()
        layer = MemoryTokenLayer(config.count, inputs.shape[1], inputs.std().item(), config.gated)
        return cls(config, layer.to(inputs.device), entrance)

    def switch(self, on: bool) -> None:
        self._entrance.prefix = Prefix(rows=self._rows, bias=self._bias) if on else None

    # The layer is looked up at each call: PEFT puts another in its place.

    def _rows(self) -> torch.Tensor:
        return self.layer()

    def _bias(self) -> torch.Tensor | None:
        return self.layer.bias()
