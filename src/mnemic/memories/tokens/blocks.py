"""Single layers of a model whose memory tokens are updated by a controller (arXiv 2006.11527, sections 2.3 and 2.4)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mnemic.hf.entrance import Entrance
from mnemic.hf.reading import prefix_read_by
from mnemic.memories.tokens.config import MemoryTokens
from mnemic.models.blocks import Block


class Owner(Protocol):
    """The memory tokens that a layer belongs to."""

    config: MemoryTokens
    controllers: nn.ModuleList
    entrance: Entrance


def memory_being_read(owner: Owner) -> int:
    """How many memory tokens stand before the sequence in what a layer is given.

    A layer that runs once more for its gradient is in no forward: it is given what it was given in training.
    """
    found = prefix_read_by(owner.entrance)
    return owner.config.count if found is None else found


_weights: ContextVar[list[Tensor] | None] = ContextVar("mnemic_memory_weights", default=None)


@contextlib.contextmanager
def watching() -> Iterator[list[Tensor]]:
    """Within this context collects, layer by layer, what such layers attend with.

    Of each the rows of the memory, (B, heads, m, m + n), and after them in a bottleneck those of the sequence: they see
    the memory alone, or, left as they are, each itself.
    """
    found: list[Tensor] = []
    token = _weights.set(found)
    try:
        yield found
    finally:
        _weights.reset(token)


def updated(owner: Owner, number: int, memory: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
    """H^mem (B, m, d) by controller `number`, in its own precision."""
    controller: Any = owner.controllers[number]
    own = next(controller.parameters()).dtype
    if mask is not None:
        mask = mask[..., :1, :] if mask.ndim == 4 else mask[:, None, None].bool()
        mask = mask if mask.dtype == torch.bool else mask.to(own)
    given = memory.to(own), states.to(own), mask
    if (found := _weights.get()) is not None:
        found.append(controller.attention.weights(*given))
    return controller(*given).to(memory.dtype)


class ControlledBlock:
    """MemCtrl: the layer goes on as it is, and what it makes of the memory is put aside for what the controller makes.

    In a causal model the memory stands before the text and must not see it, so there it reads only itself.
    """

    def __init__(self, owner: Owner, number: int, block: nn.Module, causal: bool) -> None:
        self.owner, self.number, self.block, self.causal = owner, number, block, causal
        self._names = list(inspect.signature(block.forward).parameters)
        self._hook: Any = None

    def switch(self, on: bool) -> None:
        """Takes part, or leaves the layer exactly as it was."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        if on:  # before others that look at what leaves the layer
            self._hook = self.block.register_forward_hook(self._leave, with_kwargs=True, prepend=True)

    def unused(self) -> list[nn.Parameter]:
        """None: the sequence goes through the layer's own."""
        return []

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        count = memory_being_read(self.owner)
        if not count:
            return output
        given = dict(zip(self._names, args, strict=False)) | kwargs
        states: Tensor = given["hidden_states"]
        memory = states[:, :count]
        if self.causal:
            made = updated(self.owner, self.number, memory, memory, None)
        else:
            made = updated(self.owner, self.number, memory, states, given.get("attention_mask"))
        if isinstance(output, tuple):
            return (torch.cat([made, output[0][:, count:]], dim=1), *output[1:])
        return torch.cat([made, output[:, count:]], dim=1)


class BottleneckBlock:
    """MemBottleneck: the controller reads everything, and then the layer's own attention reads the memory alone."""

    def __init__(self, owner: Owner, number: int, block: Block) -> None:
        self.owner, self.number = owner, number
        self.block: Any = block
        self._on = False
        self._covered: Callable[..., Any] | None = None  # the forward that someone else had put there

    @property
    def skips(self) -> bool:
        """Whether the sequence is left as it is."""
        return self.owner.config.variant == "bottleneck-skip"

    def switch(self, on: bool) -> None:
        """Takes part, or leaves the layer exactly as it was."""
        if on == self._on:
            return
        self._on = on
        if on:
            self._covered = vars(self.block).get("forward")
            self.block.forward = self._forward  # a hook cannot keep a module from computing
            return
        del self.block.forward
        if self._covered is not None:
            self.block.forward = self._covered

    def unused(self) -> list[nn.Parameter]:
        """The layer's own parameters, if the sequence does not go through it."""
        return list(self.block.parameters()) if self.skips else []

    def _forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        count = memory_being_read(self.owner)
        memory, sequence = hidden_states[:, :count], hidden_states[:, count:]
        memory = updated(self.owner, self.number, memory, hidden_states, attention_mask)
        if (found := _weights.get()) is not None:
            found[-1] = torch.cat([found[-1], self._sequence_weights(sequence, memory, found[-1])], dim=2)
        if not self.skips:
            sequence = self.block.read(sequence, memory, **kwargs)
        return torch.cat([memory, sequence], dim=1)

    def _sequence_weights(self, sequence: Tensor, memory: Tensor, like: Tensor) -> Tensor:
        """What the sequence attends with, (B, heads, n, m + n)."""
        length, count = sequence.shape[1], memory.shape[1]
        weights = like.new_zeros(*like.shape[:2], length, count + length)
        if self.skips:
            weights.diagonal(count, dim1=2, dim2=3).fill_(1)
        else:
            weights[..., :count] = self.block.attend_to(sequence, memory)[1]
        return weights
