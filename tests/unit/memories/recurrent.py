"""Models with recurrent memory tokens, and how segments are read with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.memories.tokens.recurrence import Carried
from tests.contract.architectures import ARCHITECTURES, VOCABULARY, build

COUNT = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
CAUSAL = [name for name in ARCHITECTURES if build(name).can_generate() and not build(name).config.is_encoder_decoder]
APART = [name for name in CAUSAL if name not in ("bloom", "falcon-alibi")]  # which keep documents in a row apart
XL = ["mnemic-t5+xl", "mnemic-xl+xl", "mnemic-rotary+xl", "mnemic-sru"]

every_architecture = pytest.mark.parametrize("architecture", CAUSAL)


def made(architecture: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A tiny model with a memory; of architectures with a `+xl`, with an XL cache."""
    name, _, xl = architecture.partition("+")
    model = build(name)
    if xl:
        model.config.xl_length = 6
    torch.manual_seed(1)
    model = mnemic.augment(model.to(dtype), mnemic.MemoryTokens.recurrent(count=COUNT, **settings)).to(dtype)
    return model.eval()


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Reader:
    """Reads one segment after the other, as training and evaluation do."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model, self.states = model, model.memory.new_state(rows)
        self.cache = model.memory.new_cache(rows) if model.memory.xl_length else None

    @property
    def state(self) -> Carried:
        found: Carried = self.states["tokens"]
        return found

    def read(self, tokens: Tensor, starts: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The losses of each next token within the segment, (B, T - 1)."""
        given: dict[str, Any] = {"attention_mask": mask} if mask is not None else {}
        if self.cache is not None:
            given |= {"past_key_values": self.cache, "use_cache": True}
        targets = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        losses: Tensor
        losses, _ = self.model.token_losses(
            targets, input_ids=tokens, memory_state=self.states, document_starts=starts, **given
        )
        return losses


def starting(shape: tuple[int, int], *places: tuple[int, int]) -> Tensor:
    starts = torch.zeros(shape, dtype=torch.bool)
    for row, column in places:
        starts[row, column] = True
    return starts
