"""Memory tokens go before the input of the model's stack (of a sequence-to-sequence model: its encoder)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from mnemic.hf.anatomy import Places
from mnemic.hf.entrance import Entrance, Prefix
from mnemic.memories.base import Handle
from mnemic.memories.tokens.config import MemoryTokens
from mnemic.memories.tokens.layer import MemoryTokenLayer, PooledHead
from mnemic.memories.tokens.pooling import keep, labelled, new_head


class Attached(Handle):
    """Memory tokens in one model."""

    def __init__(
        self, config: MemoryTokens, layer: MemoryTokenLayer, entrance: Entrance, head: PooledHead | None = None
    ) -> None:
        super().__init__(config)
        self.layer = layer
        self.head = head
        self._entrance = entrance
        self.switch(True)

    @classmethod
    def attach(cls, config: MemoryTokens, places: Places, entrance: Entrance) -> Self:  # type: ignore[override]
        inputs = places.sample_inputs()
        layer = MemoryTokenLayer(config.count, inputs.shape[1], inputs.std().item(), config.gated)
        return cls(config, layer.to(inputs.device), entrance, new_head(places) if config.pool else None)

    def switch(self, on: bool) -> None:
        self._entrance.prefix = Prefix(rows=self._rows, bias=self._bias, outputs=keep) if on else None

    def outputs(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        if self.head is None or self._entrance.prefix is None:
            return forward(**inputs)
        return labelled(self.head, self._entrance.places.stack.config, forward, inputs)

    def unused(self) -> list[nn.Parameter]:
        replaced = self._entrance.places.text_head if self.head is not None else None
        return [parameter for module in replaced or () for parameter in module.parameters()]

    # The layer is looked up at each call: PEFT puts another in its place.

    def _rows(self) -> torch.Tensor:
        return self.layer()

    def _bias(self) -> torch.Tensor | None:
        return self.layer.bias()
