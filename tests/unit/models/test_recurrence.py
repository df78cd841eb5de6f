"""The recurrence of SRU: its states and its handwritten gradient against the steps one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mnemic.models.recurrence import recur, states_before
from tests.unit.models.naive_sru import naive_states

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def recurrence_inputs(starts: list[set[int]], length: int = 7) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    gates, values = (torch.randn(len(starts), length, 3, dtype=torch.float64) for _ in range(2))
    weight, state = torch.randn(3, dtype=torch.float64), torch.randn(len(starts), 3, dtype=torch.float64)
    marks = torch.tensor([[t in row for t in range(length)] for row in starts])
    return gates, values, weight, state, marks


@pytest.mark.parametrize("starts", [[set(), set()], [{0}, set()], [{3}, {2, 6}]])
def test_the_recurrence_is_that_of_the_oracle(starts: list[set[int]]) -> None:
    gates, values, weight, state, marks = recurrence_inputs(starts)
    found = recur(gates, values, weight, state, marks if marks.any() else None)
    for row in range(2):
        expected = naive_states(gates[row], values[row], weight, state[row], marks[row])
        torch.testing.assert_close(found[row], expected, **CLOSE)


@pytest.mark.parametrize("starts", [[set(), set()], [{0}, set()], [{3}, {2, 6}]])
@pytest.mark.parametrize("length", [1, 7])
def test_its_gradient_is_right(starts: list[set[int]], length: int) -> None:
    gates, values, weight, state, marks = recurrence_inputs(starts, length)
    inputs = [part.requires_grad_() for part in (gates, values, weight, state)]
    assert torch.autograd.gradcheck(lambda *given: recur(*given, marks), inputs)


def test_its_gradient_is_that_of_the_steps_one_by_one() -> None:
    gates, values, weight, state, marks = recurrence_inputs([{3}, {2, 6}])
    inputs = [part.requires_grad_() for part in (gates, values, weight, state)]
    factors = torch.randn(values.shape, dtype=torch.float64)
    found = torch.autograd.grad((recur(*inputs, marks) * factors).sum(), inputs)
    before, total = state, 0
    for t in range(values.shape[1]):
        before = torch.where(marks[:, t, None], 0.0, before)
        forget = torch.sigmoid(gates[:, t] + weight * before)
        before = forget * before + (1 - forget) * values[:, t]
        total = total + (before * factors[:, t]).sum()
    for one, other in zip(found, torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_an_infinite_gate_passes_the_state_on_and_gets_no_gradient() -> None:
    gates, values, weight, state, _ = recurrence_inputs([set(), set()])
    gates[0, 2:5] = torch.inf
    gates.requires_grad_(), values.requires_grad_()
    states = recur(gates, values, weight, state)
    assert torch.equal(states[0, 1], states[0, 4])
    assert torch.equal(states_before(states, state, None)[0, 5], states[0, 1])
    states.sum().backward()
    for part in (gates, values):
        assert not part.grad[0, 2:5].any()
        assert part.grad[0, [0, 1, 5, 6]].all()
