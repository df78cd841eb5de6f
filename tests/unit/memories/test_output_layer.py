"""The mathematics of the output memory against naive float64 versions of Eq. 5, 6, 8 and 9, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mnemic.memories.output import layer
from mnemic.memories.output.layer import NOTHING, Mass, Own, Past, comparable, mass

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 11, 6, 5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def similarity(query: Tensor, key: Tensor, kind: str) -> float:
    if kind == "dot":
        return float(query @ key) / math.sqrt(len(query))
    return -float(((query - key) ** 2).sum())


def log(total: float) -> float:
    return math.log(total) if total else -math.inf


@pytest.fixture(params=[(1 << 22, False), (40, False), (40, True)], ids=["one block", "many blocks", "far apart"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    size, far = request.param
    monkeypatch.setattr(layer, "BLOCK", size)
    monkeypatch.setattr(layer, "_far_apart", lambda *_: far)


def naive(keys: Tensor, targets: Tensor, values: Tensor, seen: Any, kind: str) -> Mass:
    """Sums over pairs in Python; `seen(row, t, j)` says whether context t sees pair j."""
    everything, matching = (torch.full(targets.shape, -math.inf, dtype=torch.float64) for _ in range(2))
    for row in range(len(keys)):
        for t in range(keys.shape[1]):
            weights = [
                (math.exp(similarity(keys[row, t], keys[row, j], kind)), int(values[row, j]))
                for j in range(keys.shape[1])
                if seen(row, t, j) and int(values[row, j]) != NOTHING
            ]
            everything[row, t] = log(sum(weight for weight, _ in weights))
            matching[row, t] = log(sum(weight for weight, value in weights if value == int(targets[row, t])))
    return Mass(everything, matching)


def assert_equal(found: Mass, wanted: Mass) -> None:
    torch.testing.assert_close(found.all, wanted.all, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.target, wanted.target, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", ["dot", "distance"])
def test_a_context_sees_what_came_before_in_its_document(kind: str) -> None:
    keys, targets, values = draw(ROWS, LENGTH, WIDTH), tokens(ROWS, LENGTH), tokens(ROWS, LENGTH, seed=1)
    values[0, 3] = values[2, 0] = NOTHING
    documents = (torch.arange(LENGTH) >= torch.tensor([[4], [7], [11]])).long()
    found = mass(*comparable(keys, keys, kind), targets, values, Own(documents))
    assert_equal(
        found, naive(keys, targets, values, lambda r, t, j: j < t and documents[r, j] == documents[r, t], kind)
    )
    assert (found.all[:, 0] == -math.inf).all()


@pytest.mark.usefixtures("blocks")
def test_a_context_sees_all_other_segments_and_its_own_past_where_that_is_kept() -> None:
    keys, targets, values = draw(1, 12, WIDTH), tokens(1, 12), tokens(1, 12, seed=1)
    segments = torch.arange(12)[None] // 4
    local = segments == 1
    found = mass(*comparable(keys, keys, "dot"), targets, values, Own(segments, segments, local))

    def seen(row: int, t: int, j: int) -> bool:
        return bool(segments[0, j] != segments[0, t] or (j < t and local[0, t]))

    assert_equal(found, naive(keys, targets, values, seen, "dot"))


@pytest.mark.usefixtures("blocks")
def test_what_was_read_before_is_seen_by_its_document() -> None:
    keys, targets, values = draw(ROWS, LENGTH, WIDTH), tokens(ROWS, LENGTH), tokens(ROWS, LENGTH, seed=1)
    documents, pairs = tokens(ROWS, LENGTH, seed=2), tokens(ROWS, LENGTH, seed=3)
    found = mass(*comparable(keys, keys, "dot"), targets, values, Past(documents, pairs))
    assert_equal(found, naive(keys, targets, values, lambda r, t, j: documents[r, t] == pairs[r, j], "dot"))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", ["dot", "distance"])
def test_the_gradient_through_queries_and_memory_is_right(kind: str) -> None:
    targets, values = tokens(2, 6), tokens(2, 6, seed=1)
    values[0, 2] = NOTHING
    documents = torch.zeros(2, 6, dtype=torch.long)

    def losses(keys: Tensor, own: Tensor, normalisers: Tensor) -> Tensor:
        memory = mass(*comparable(keys, keys, kind), targets, values, Own(documents))
        return layer.joint_loss(own, normalisers, memory)

    given = (draw(2, 6, 3) / 2, draw(2, 6, seed=4).abs(), draw(2, 6, seed=5))
    assert torch.autograd.gradcheck(losses, [t.requires_grad_() for t in given])


def test_a_memory_without_gradient_changes_only_the_queries() -> None:
    keys = draw(1, 6, 3).requires_grad_()
    documents, targets = torch.zeros(1, 6, dtype=torch.long), tokens(1, 6)
    pairs = keys.detach().requires_grad_()
    found = mass(*comparable(keys, pairs, "dot"), targets, targets, Own(documents))
    found.all[:, 1:].sum().backward()
    assert keys.grad is not None
    assert (keys.grad[:, 0] == 0).all(), "the first context has no memory"
    assert pairs.grad is not None
    assert (pairs.grad[:, 0] != 0).any()
    assert (pairs.grad[:, -1] == 0).all(), "the last pair is seen by no one"


def probabilities(
    logits: Tensor, memory: list[tuple[float, int]], joint: bool, tau: float, weight: float, mix_tau: float
) -> Tensor:
    """P_final over the vocabulary, by Eq. 6, 8 and 9 as they stand."""
    mass_of = logits.exp()
    if joint:
        for score, value in memory:
            mass_of[value] += math.exp(score / tau)
    result = mass_of / mass_of.sum()
    if weight and memory:
        own = torch.zeros_like(logits)
        for score, value in memory:
            own[value] += math.exp(score / mix_tau)
        result = (1 - weight) * result + weight * own / own.sum()
    return result


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("pairs", [0, 1, 7])
def test_the_probability_of_each_token_is_that_of_the_equations(joint: bool, weight: float, pairs: int) -> None:
    logits, scores, values = draw(VOCABULARY), draw(pairs, seed=1), tokens(pairs, seed=2)
    tau, mix_tau = 0.7, 2.0
    wanted = probabilities(
        logits, list(zip(scores.tolist(), values.tolist(), strict=True)), joint, tau, weight, mix_tau
    )
    assert wanted.sum() == pytest.approx(1)
    mask = torch.ones(1, pairs, dtype=torch.bool)
    for target in range(VOCABULARY):
        wish = torch.tensor([target])
        loss, normaliser = -logits.log_softmax(0)[target][None], logits.logsumexp(0)[None]
        if joint:
            loss = layer.joint_loss(loss, normaliser, layer.mass_of_found(scores[None] / tau, wish, values[None], mask))
        if weight:
            own = layer.mass_of_found(scores[None] / mix_tau, wish, values[None], mask)
            loss = layer.mixed_loss(loss, own, weight)
        assert float(loss) == pytest.approx(-math.log(wanted[target]), abs=1e-12)
    spread = layer.spread(scores / tau, values, VOCABULARY)
    if joint:
        found = layer.joint_distribution(logits.log_softmax(0), logits.logsumexp(0), spread)
        plain = probabilities(logits, list(zip(scores.tolist(), values.tolist(), strict=True)), True, tau, 0, 1)
        torch.testing.assert_close(found.exp(), plain)


def test_scores_that_lie_far_apart_do_not_vanish() -> None:
    """exp(90) is nothing beside exp(200) in float32, and yet all the mass of a target that has no other."""
    queries = torch.ones(1, 1, 1, requires_grad=True)
    keys = torch.tensor([[[200.0], [90.0], [10.0]]], requires_grad=True)
    values, targets, documents = torch.tensor([[0, 1, 2]]), torch.tensor([[1]]), torch.zeros(1, 3, dtype=torch.long)
    sight = Past(documents[:, :1], documents)
    found = mass(queries, keys, targets, values, sight)
    layer.joint_loss(torch.tensor([[300.0]]), torch.tensor([[100.0]]), found).sum().backward()
    assert (found.all.item(), found.target.item()) == (200, 90)
    assert keys.grad is not None
    assert keys.grad.flatten().tolist() == [1, -1, 0]
    tested = layer.masses(queries.detach(), keys.detach(), targets, values, sight, (0.5,))
    assert (tested.all.item(), tested.target.item()) == (400, 180)
    masses, total = layer.spread(keys.detach()[0, :, 0], values[0], VOCABULARY)
    assert masses[:3].tolist() == [200, 90, 10]
    assert float(total) == 200
    whole = layer.joint_distribution(torch.full((VOCABULARY,), -2.0), torch.tensor(150.0), (masses, total))
    assert whole[:4].tolist() == [0, -52, -52, -52]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_no_more_similarities_are_formed_than_fit_into_a_block(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """However many contexts there are: of training, of testing, and of the way back."""
    sizes, real = list[int](), layer._blocks

    def watched(*arguments: Any) -> Any:
        for block in real(*arguments):
            sizes.append(block[2].numel())
            yield block

    monkeypatch.setattr(layer, "BLOCK", step * ROWS * LENGTH)
    monkeypatch.setattr(layer, "_blocks", watched)
    keys, values = draw(ROWS, LENGTH, WIDTH).requires_grad_(), tokens(ROWS, LENGTH)
    sight = Past(torch.zeros(ROWS, LENGTH), torch.zeros(ROWS, LENGTH))
    mass(keys, keys, values, values, sight).all.sum().backward()
    layer.masses(keys.detach(), keys.detach(), values, values, sight, (1.0,))
    assert len(sizes) == 3 * math.ceil(LENGTH / step)
    assert max(sizes) == min(step, LENGTH) * ROWS * LENGTH


def test_masses_of_several_memories_add_up() -> None:
    scores, values, targets = draw(4, 9), tokens(4, 9, seed=1), tokens(4, seed=2)
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[2] = False
    whole = layer.mass_of_found(scores, targets, values, mask)
    parts = [
        layer.mass_of_found(scores[:, part], targets, values[:, part], mask[:, part])
        for part in (slice(0, 4), slice(4, 9))
    ]
    assert_equal(parts[0] + parts[1], whole)
    assert whole.all[2] == -math.inf


def test_two_distributions_are_blended_and_an_empty_one_leaves_the_other() -> None:
    one, other = (
        Mass(torch.tensor([1.0, -math.inf, 0.5, -math.inf]), torch.tensor([0.2, -math.inf, -math.inf, -math.inf])),
        Mass(torch.tensor([2.0, 0.3, -math.inf, -math.inf]), torch.tensor([1.5, 0.1, -math.inf, -math.inf])),
    )
    found = layer.blended(one, other, 0.25)
    wanted = [0.25 * math.exp(0.2 - 1.0) + 0.75 * math.exp(1.5 - 2.0), math.exp(0.1 - 0.3), 0, 0]
    torch.testing.assert_close(found.target.exp(), torch.tensor(wanted))
    assert found.all.tolist() == [0, 0, 0, -math.inf]
