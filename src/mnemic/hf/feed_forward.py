"""A way into the feed-forward of single layers: what is added to its output, or put in its place.

A feed-forward is one module, or several that a block calls one after the other: its input enters the first, and what
leaves the last goes to dropout and the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from mnemic.errors import UsageError
from mnemic.hf.reading import is_reading, mask_being_read
from mnemic.memories.product_keys.layer import repeated

Add = Callable[[Tensor, Tensor | None], Tensor]
"""What is added, given the feed-forward's input (..., d) and which of its tokens are real, (tokens,), None for all."""

PENDING = 8  # forwards whose layers can run again in a backward pass
SAMPLE = 8  # numbers of each token by which a layer's input is known again
NEAR = 0.05  # and how far from them, as a share of their norm, it may be

_input: ContextVar[Tensor | None] = ContextVar("mnemic_feed_forward_input", default=None)


class FeedForwardHook:
    """Adds to what the feed-forward of one layer puts out.

    instead: modules that compute in place of the layer's own; empty: nothing does, and what is added stands alone;
    None: the layer's own stay.
    """

    def __init__(self, modules: Sequence[nn.Module], add: Add, instead: Sequence[nn.Module] | None = None) -> None:
        self.add, self.instead = add, instead
        self.first, self.last = modules[0], modules[-1]
        self._hooks: list[Any] = []
        self._covered: list[tuple[nn.Module, Any]] = []  # and the forward that someone else had put on each
        self._pending: list[tuple[Tensor, Tensor | None]] = []  # what came in, and which of its tokens are real
        self.switch(True)

    def switch(self, on: bool) -> None:
        """Takes part, or leaves the layer exactly as it was."""
        for hook in self._hooks:
            hook.remove()
        for module, forward in self._covered:
            del module.forward
            if forward is not None:
                module.forward = forward
        self._hooks, self._covered = [], []
        if not on:
            return
        self._hooks = [
            self.first.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.last.register_forward_hook(self._leave),
        ]
        if self.instead is not None:  # a hook cannot keep a module from computing
            self._cover(self.last, self._compute_last)
            if self.first is not self.last:
                self._cover(self.first, self._compute_first)

    def _cover(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._covered.append((module, vars(module).get("forward")))
        module.forward = forward

    def unused(self) -> list[nn.Parameter]:
        """The parameters of the layer's own feed-forward, if others compute in its place."""
        if self.instead is None:
            return []
        return list({id(p): p for module in (self.first, self.last) for p in module.parameters()}.values())

    def _enter(self, _: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        _input.set((*args, *named.values())[0])

    def _leave(self, _: nn.Module, __: tuple, output: Tensor) -> Tensor:
        entered = _input.get()
        _input.set(None)
        return output if entered is None else output + self.add(entered, self._real(entered))

    def _real(self, entered: Tensor) -> Tensor | None:
        """`real_tokens`, of an earlier forward if this layer of it runs again (activation checkpointing)."""
        sample = entered.detach().flatten(0, -2)[:, :SAMPLE]
        if is_reading():
            real = real_tokens(entered)
            if self.last.training or torch.is_grad_enabled():
                self._pending = [*self._pending[1 - PENDING :], (sample.clone(), real)]
            return real
        # kernels may differ the second time, and so the input is known again by being far nearer than any other
        same = [(seen, real) for seen, real in self._pending if seen.shape == sample.shape]
        nearest = min(same, key=lambda one: torch.dist(one[0], sample).item(), default=None)
        if nearest is not None and torch.dist(nearest[0], sample) <= NEAR * sample.norm():
            return nearest[1]
        if repeated():
            raise UsageError(
                f"with gradient checkpointing product keys remember the padding of the last {PENDING} forwards, and "
                "this gradient is of an earlier one: call backward() after fewer forwards"
            )
        return None

    def _compute_first(self, *args: Any, **named: Any) -> Tensor:
        if self.instead:
            return self.instead[0](*args, **named)
        entered: Tensor = (*args, *named.values())[0]  # what is between is not needed, but others may look at it (PEFT)
        width = getattr(self.last, "in_features", entered.shape[-1])
        return entered.new_zeros(()).expand(*entered.shape[:-1], width)

    def _compute_last(self, *args: Any, **named: Any) -> Any:
        if self.instead:
            return self.instead[-1](*args, **named)
        entered = _input.get()
        return 0 if entered is None else entered.new_zeros(())


def real_tokens(states: Tensor) -> Tensor | None:
    """Which tokens of what a module got, (..., d), are no padding, (tokens,); None if all are or nothing is known."""
    mask, tokens = mask_being_read(), states.shape[:-1].numel()
    if mask is None or mask.ndim != 2 or tokens % len(mask) or tokens > mask.numel():
        return None
    real = mask[:, -(tokens // len(mask)) :].reshape(-1).bool()
    return None if real.all() else real
