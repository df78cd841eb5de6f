"""The elementwise recurrence of the Simple Recurrent Unit (SRU, arXiv 1709.02755), forward and backward.

    f_t = sigmoid(a_t + v * p_t)        a: what the forget gate is given by the input, p_t: the state before
    c_t = f_t * p_t + (1 - f_t) * u_t   u: the candidate values
    p_t = c_{t-1}, or 0 where a document starts

Each number of the state goes its own way, so a step is three operations on (B, d), and one in the backward pass:

    dL/dc_t = g_t + dL/dc_{t+1} * (f + f (1 - f) (p - u) v)_{t+1}        g: what comes from outside
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def recur(gates: Tensor, values: Tensor, weight: Tensor, state: Tensor, starts: Tensor | None = None) -> Tensor:
    """The states c, (B, T, d), from a and u (B, T, d), v (d,) and the state before the first step (B, d).

    Where `starts` (B, T) is true the step begins from 0. A gate of plus infinity passes the state on as it is.
    """
    return _Recurrence.apply(gates, values, weight, state, starts)


def states_before(states: Tensor, state: Tensor, starts: Tensor | None) -> Tensor:
    """p, (B, T, d): the state that each step begins from."""
    before = torch.cat([state.unsqueeze(1), states[:, :-1]], dim=1)
    return before if starts is None else before.masked_fill(starts.unsqueeze(2), 0.0)


class _Recurrence(torch.autograd.Function):
    """Written out, for autograd would keep and visit every step's operations one by one."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, values: Tensor, weight: Tensor, state: Tensor, starts: Tensor | None
    ) -> Tensor:
        forget, states = (torch.empty(values.shape, dtype=values.dtype, device=values.device) for _ in range(2))
        begins = [False] * values.shape[1] if starts is None else starts.any(0).tolist()
        before = state
        steps = zip(begins, *(part.unbind(1) for part in (gates, values, forget, states)), strict=True)
        for step, (some_begin, gate, value, kept, after) in enumerate(steps):
            if some_begin and starts is not None:
                before = before.masked_fill(starts[:, step, None], 0.0)
            torch.addcmul(gate, weight, before, out=kept).sigmoid_()
            before = torch.lerp(value, before, kept, out=after)
        ctx.save_for_backward(values, weight, state, forget, states)
        ctx.starts = starts
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        values, weight, state, forget, states = ctx.saved_tensors
        before = states_before(states, state, ctx.starts)
        slope = forget * (1 - forget) * (before - values)  # of c_t by a_t
        passed_on = torch.addcmul(forget, slope, weight)  # of c_t by p_t
        if ctx.starts is not None:
            passed_on.masked_fill_(ctx.starts.unsqueeze(2), 0.0)
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        steps = list(zip(passed_on.unbind(1), total.unbind(1), strict=True))
        for (_, earlier), (factor, later) in zip(steps[-2::-1], steps[:0:-1], strict=True):
            earlier.addcmul_(factor, later)
        for_gates = total * slope
        for_weight = (for_gates * before).sum((0, 1))
        for_state = passed_on[:, 0] * total[:, 0]
        return for_gates, total * (1 - forget), for_weight, for_state, None
