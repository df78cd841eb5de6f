"""Which parameters are trained and decayed, and that the optimisers are the papers'."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mnemic.errors import UsageError
from mnemic.train.config import TrainConfig
from mnemic.train.optimizers import load_optimizer_tensors, make_optimizer, optimizer_tensors, select_trainable
from mnemic.train.schedules import learning_rate


class WithMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.memory_like = nn.Linear(3, 3)
        self.memory = nn.ModuleDict({"tokens": nn.Linear(3, 2)})


def test_all_respects_what_is_frozen_already() -> None:
    model = WithMemory()
    model.base.weight.requires_grad_(False)
    assert "base.weight" not in select_trainable(model, TrainConfig())
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="frozen"):
        select_trainable(model, TrainConfig())


def test_memory_trains_the_memory_only() -> None:
    model = WithMemory()
    chosen = select_trainable(model, TrainConfig(trainable="memory"))
    assert sorted(chosen) == ["memory.tokens.bias", "memory.tokens.weight"]
    assert not any(p.requires_grad for n, p in model.named_parameters() if not n.startswith("memory."))
    with pytest.raises(UsageError, match=r"mnemic\.augment"):
        select_trainable(nn.Linear(2, 2), TrainConfig(trainable="memory"))


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_decay_shrinks_matrices_and_leaves_vectors(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = TrainConfig(optimizer=name, weight_decay=0.5, learning_rate=0.1)
    optimizer = make_optimizer(dict(model.named_parameters()), config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter_name, parameter in model.named_parameters():
        shrunk = 0.5 * 0.1 if parameter.ndim >= 2 else 0.0
        torch.testing.assert_close(parameter.detach(), before[parameter_name] * (1 - shrunk))


def test_adafactor_with_rsqrt_is_the_papers() -> None:
    """arXiv:1804.04235, algorithm 4 (factored, clipped at 1, relative step) at the rate of Memorizing Transformers."""
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    config = TrainConfig(optimizer="adafactor", schedule="rsqrt", learning_rate=1.0, warmup=3, weight_decay=0.0)
    optimizer = make_optimizer({"p": parameter}, config)
    x, rows, columns = parameter.detach().clone(), torch.zeros(5, dtype=torch.float64), torch.zeros(3).double()
    for step in range(1, 9):
        gradient = torch.randn(5, 3, dtype=torch.float64)
        beta = 1 - step**-0.8
        rows = beta * rows + (1 - beta) * gradient.square().mean(1)
        columns = beta * columns + (1 - beta) * gradient.square().mean(0)
        update = gradient / (rows[:, None] * columns[None] / rows.mean()).sqrt()
        update /= max(1.0, update.square().mean().sqrt().item())
        rate = min(1.0, step / 3) / math.sqrt(max(step, 3))
        x = x - rate * max(1e-3, x.square().mean().sqrt().item()) * update
        parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_state_goes_on_exactly_in_another_optimizer(name: str) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()

    config = TrainConfig(optimizer=name)
    torch.manual_seed(0)
    one = WithMemory()
    one.base.weight.requires_grad_(False)
    chosen = select_trainable(one, config)
    optimizer = make_optimizer(chosen, config)
    run(one, optimizer, range(3))
    tensors = {key: value.clone() for key, value in optimizer_tensors(optimizer, chosen).items()}
    assert not any(key.startswith("base.weight") for key in tensors)
    two = WithMemory()
    two.load_state_dict(one.state_dict())
    two.base.weight.requires_grad_(False)
    again = make_optimizer(select_trainable(two, config), config)
    load_optimizer_tensors(again, select_trainable(two, config), tensors)
    run(one, optimizer, range(3, 6))
    run(two, again, range(3, 6))
    for left, right in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(left, right)
