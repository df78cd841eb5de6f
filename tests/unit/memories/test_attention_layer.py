"""The mathematics of attention to a memory, against a naive version in double precision, loop by loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mnemic.memories.attention.layer import (
    MemoryMix,
    attend_to_all,
    attend_to_pairs,
    local_mass,
    mixed,
    unit,
)

B, H, T, K, D = 2, 3, 5, 4, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(query: Tensor, keys: Tensor, values: Tensor, found: Tensor) -> tuple[Tensor, float]:
    """One query's attention to its pairs."""
    weights = [math.exp(float(query @ key)) if f else 0.0 for key, f in zip(keys, found, strict=True)]
    if not any(weights):
        return torch.zeros_like(query), 0.0
    total = sum(weights)
    parts = [weight / total * value for weight, value in zip(weights, values, strict=True)]
    return torch.stack(parts).sum(0), math.log(total)


@pytest.fixture
def pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = torch.rand(B, H, T, K, generator=torch.Generator().manual_seed(3)) < 0.6
    found[0, 0, 0] = False
    found[1, 2, 3] = True
    return random(B, H, T, D), random(B, H, T, K, D, seed=1), random(B, H, T, K, D, seed=2), found


def test_attention_to_found_pairs_is_the_naive_one(pairs: tuple[Tensor, ...]) -> None:
    queries, keys, values, found = pairs
    result, mass = attend_to_pairs(queries, keys, values, found)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                expected, log_sum = naive(queries[b, h, t], keys[b, h, t], values[b, h, t], found[b, h, t])
                torch.testing.assert_close(result[b, h, t], expected)
                if found[b, h, t].any():
                    assert mass[b, h, t].item() == pytest.approx(log_sum)


def test_what_was_not_found_takes_no_part_whatever_it_is(pairs: tuple[Tensor, ...]) -> None:
    queries, keys, values, found = pairs
    other_keys = torch.where(found.unsqueeze(-1), keys, 1e3)
    other_values = torch.where(found.unsqueeze(-1), values, 1e3)
    for one, other in zip(
        attend_to_pairs(queries, keys, values, found),
        attend_to_pairs(queries, other_keys, other_values, found),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_the_gradient_through_the_scores_is_right(pairs: tuple[Tensor, ...]) -> None:
    queries, keys, values, found = pairs
    queries.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda q: attend_to_pairs(q, keys, values, found), (queries,))


def test_dense_attention_is_attention_to_every_pair_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = random(H, T, D).requires_grad_(True), random(H, 11, D, seed=1), random(H, 11, D, seed=2)
    for block in (3, 11, 4096):
        monkeypatch.setattr("mnemic.memories.attention.layer.BLOCK", block)
        result, mass = attend_to_all(queries, keys, values)
        for h in range(H):
            for t in range(T):
                expected, log_sum = naive(queries[h, t].detach(), keys[h], values[h], torch.ones(11))
                torch.testing.assert_close(result[h, t].detach(), expected)
                assert mass[h, t].item() == pytest.approx(log_sum)
        assert torch.autograd.gradcheck(lambda q: attend_to_all(q, keys, values), (queries,))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("masked", ["causal", "added", "shown", "none"])
def test_the_mass_of_the_context_is_that_of_its_softmax(masked: str, biased: bool) -> None:
    queries, keys = random(B, H, T, D), random(B, H, T + 2, D, seed=1)
    visible = torch.ones(T, T + 2, dtype=torch.bool).tril()  # as torch's own attention has it
    bias, own = random(H, T, T + 2, seed=4), random(1, H, T, T + 2, seed=5) * biased
    mask = {"causal": None, "none": None, "shown": visible.expand(B, 1, -1, -1)}.get(masked, bias.expand(B, -1, -1, -1))
    got = local_mass(queries, keys, own if biased else None, mask, 0.7, causal=masked == "causal")
    for b in range(B):
        for h in range(H):
            for t in range(T):
                scores = []
                for j in range(T + 2):
                    if masked in ("causal", "shown") and not visible[t, j]:
                        continue
                    score = 0.7 * float(queries[b, h, t] @ keys[b, h, j]) + float(own[0, h, t, j])
                    scores.append(score + (float(bias[h, t, j]) if masked == "added" else 0.0))
                assert got[b, h, t].item() == pytest.approx(math.log(sum(map(math.exp, scores))))


def test_the_joint_share_makes_one_softmax_of_context_and_memory(pairs: tuple[Tensor, ...]) -> None:
    queries, keys, values, found = pairs
    context, context_values = random(B, H, T, D, seed=5), random(B, H, T, D, seed=6)
    mix = MemoryMix(H, "joint", 1.0).double()
    with torch.no_grad():
        mix.gate.copy_(0.1 * random(H, seed=7))
    memory, mass = attend_to_pairs(queries, keys, values, found)
    near = local_mass(queries, context, None, None, 1.0, causal=True)
    local = torch.nn.functional.scaled_dot_product_attention(
        queries, context, context_values, is_causal=True, scale=1.0
    )
    got = mixed(local, memory, mix.share(mass, lambda: near), found.any(-1))
    for b in range(B):
        for h in range(H):
            for t in range(T):
                q, raised = queries[b, h, t], mix.bias()[h].item()
                weights = [math.exp(float(q @ context[b, h, j])) for j in range(t + 1)]
                weights += [
                    math.exp(float(q @ keys[b, h, t, j]) + raised) if found[b, h, t, j] else 0.0 for j in range(K)
                ]
                everything = torch.cat([context_values[b, h, : t + 1], values[b, h, t]])
                expected = (torch.tensor(weights).double()[:, None] * everything).sum(0) / sum(weights)
                torch.testing.assert_close(got[b, h, t].detach(), expected)


@pytest.mark.parametrize(("mix", "share"), [("gate", lambda b: 1 / (1 + math.exp(-b))), ("tanh", math.tanh)])
def test_a_gate_mixes_each_head_by_its_own_number(mix: str, share: object) -> None:
    layer = MemoryMix(H, mix, 1.0).double()
    with torch.no_grad():
        layer.gate.copy_(torch.tensor([-0.1, 0.05, 0.2]))
    local, memory = random(B, H, T, D), random(B, H, T, D, seed=1)
    got = mixed(local, memory, layer.share(local[..., 0], lambda: local[..., 0]), torch.ones(B, H, T, dtype=torch.bool))
    for h in range(H):
        g = share(layer.bias()[h].item())  # type: ignore[operator]
        torch.testing.assert_close(got[:, h].detach(), g * memory[:, h] + (1 - g) * local[:, h])


@pytest.mark.parametrize("mix", ["gate", "tanh", "joint"])
def test_without_anything_found_the_context_is_all_there_is(mix: str, pairs: tuple[Tensor, ...]) -> None:
    queries, keys, values, _ = pairs
    nothing = torch.zeros(B, H, T, K, dtype=torch.bool)
    layer = MemoryMix(H, mix, 1.0).double()
    with torch.no_grad():
        layer.gate.fill_(3.0)
    queries = queries.clone().requires_grad_(True)
    memory, mass = attend_to_pairs(queries, keys, values, nothing)
    local = random(B, H, T, D, seed=9)
    got = mixed(local, memory, layer.share(mass, lambda: local[..., 0]), nothing.any(-1))
    assert torch.equal(got, local)
    got.sum().backward()
    assert queries.grad is None or queries.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_a_tanh_gate_starts_without_effect_and_learns_at_once() -> None:
    layer = MemoryMix(H, "tanh", 1.0).double()
    local, memory = random(B, H, T, D), random(B, H, T, D, seed=1)
    got = mixed(local, memory, layer.share(local[..., 0], lambda: local[..., 0]), torch.ones(B, H, T, dtype=torch.bool))
    assert torch.equal(got, local)
    got.square().sum().backward()
    assert (layer.gate.grad.abs() > 1e-3).all()  # type: ignore[union-attr]


def test_unit_vectors_have_length_one_and_zero_stays_zero() -> None:
    states = torch.cat([random(3, D), torch.zeros(1, D).double()])
    torch.testing.assert_close(unit(states).norm(dim=-1), torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
