"""The mathematics of the output memory, in plain torch (TRIME, arXiv 2205.12674, sections 3 and 4, appendix A).

A memory is a set of pairs (g_j, x_j): the key of a context and the token that followed it. It takes part in the softmax
over the vocabulary (Eq. 5, and Eq. 6 with a temperature):

    P(w | c) ~ exp(E_w f(c)) + sum_{j: x_j = w} exp(sim(g(c), g_j) / tau)

and, as in kNN-LM and the continuous cache, may be mixed with it as a distribution of its own (Eq. 8, 9):

    P'(w | c) ~ sum_{j: x_j = w} exp(sim(g(c), g_j) / tau')          P_final = (1 - lambda) P + lambda P'

For the probability of one token, two sums over the memory are enough, that of all its pairs and that of the pairs with
this token. They are kept as logarithms, a `Mass`; the masses of several memories add up. No array of the size of the
vocabulary is formed, and of the similarities only a block at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1 << 21  # similarities that are formed at a time
NOTHING = -100  # a value that is no token: of padding, of a document's end, or not known yet


@dataclass(frozen=True)
class Mass:
    """For each query, the logarithm of the memory's mass: of all pairs, and of those whose token is the target."""

    all: Tensor
    target: Tensor

    def __add__(self, other: Mass) -> Mass:
        return Mass(torch.logaddexp(self.all, other.all), torch.logaddexp(self.target, other.target))


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def comparable(queries: Tensor, keys: Tensor, similarity: str) -> tuple[Tensor, Tensor]:
    """Vectors whose inner product is the similarity: q k / sqrt(d) for "dot", -|q - k|^2 for "distance"."""
    queries, keys = precise(queries), precise(keys)
    if similarity == "dot":
        return queries / math.sqrt(queries.shape[-1]), keys
    ones, squares = torch.ones_like(queries[..., :1]), queries.square().sum(-1, keepdim=True)
    queries = torch.cat([2 * queries, -squares, ones], -1)
    ones, squares = torch.ones_like(keys[..., :1]), keys.square().sum(-1, keepdim=True)
    return queries, torch.cat([keys, ones, -squares], -1)


# Which pairs a context sees


@dataclass(frozen=True)
class Own:
    """Contexts and pairs are the same N tokens of each row: a context sees what came before it in its document.

    documents: (R, N), equal numbers are one document. segments: (R, N) or None; with them, a context also sees all
    tokens of other segments, and those of its own only where `local` (R, N) is true.
    """

    documents: Tensor
    segments: Tensor | None = None
    local: Tensor | None = None

    def end(self, last: int, pairs: int) -> int:
        """How many of the first pairs the contexts up to `last` can see at most."""
        return pairs if self.segments is not None else min(last, pairs)

    def hide(self, scores: Tensor, start: int, last: int) -> None:
        """Sets scores (R, contexts, pairs) of the contexts from `start` to `last` to -inf where a pair is not seen."""
        end = scores.shape[-1]
        if self.segments is not None:
            scores.masked_fill_(~self._visible(start, last, end), -torch.inf)
            return
        later = torch.ones(last - start, end - start, dtype=torch.bool, device=scores.device).triu()
        scores[..., start:].masked_fill_(later, -torch.inf)
        if (self.documents != self.documents[:, :1]).any():
            scores.masked_fill_(self.documents[:, start:last, None] != self.documents[:, None, :end], -torch.inf)

    def _visible(self, start: int, last: int, end: int) -> Tensor:
        device, segments = self.documents.device, self.segments
        before = torch.arange(end, device=device) < torch.arange(start, last, device=device)[:, None]
        own = before & (self.documents[:, start:last, None] == self.documents[:, None, :end])
        if self.local is not None:
            own &= self.local[:, start:last, None]
        return own | (segments[:, start:last, None] != segments[:, None, :end])  # type: ignore[index]


@dataclass(frozen=True)
class Past:
    """Pairs that were read before: a context sees those of its own document. documents: (R, N); pairs: (R, M)."""

    documents: Tensor
    pairs: Tensor

    def end(self, last: int, pairs: int) -> int:
        """How many of the first pairs the contexts up to `last` can see at most."""
        return pairs

    def hide(self, scores: Tensor, start: int, last: int) -> None:
        """Sets scores (R, contexts, pairs) of the contexts from `start` to `last` to -inf where a pair is not seen."""
        scores.masked_fill_(self.documents[:, start:last, None] != self.pairs[:, None], -torch.inf)


def mass(queries: Tensor, keys: Tensor, targets: Tensor, values: Tensor, sight: Own | Past) -> Mass:
    """The mass of pairs (R, M) for contexts (R, N) with these targets; `comparable` has prepared queries and keys.

    Pairs with value NOTHING do not count. The backward pass forms the similarities again, block by block.
    """
    with torch.autocast(queries.device.type, enabled=False):
        return Mass(*_Mass.apply(queries, keys, targets, values, sight))


class _Mass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, targets: Tensor, values: Tensor, sight: Own | Past
    ) -> tuple[Tensor, Tensor]:
        everything, matching = (torch.full_like(targets, -torch.inf, dtype=queries.dtype) for _ in range(2))
        far = _far_apart(queries, keys)
        for start, last, scores, match in _blocks(queries, keys, targets, values, sight):
            highest, place = scores.max(-1)
            shares = scores.softmax(-1)  # of a context's mass; undefined where it sees nothing
            total = highest - shares.gather(-1, place[..., None]).squeeze(-1).log()
            of_target = _Few(match).logsumexp(scores) if far else shares.mul_(match).sum(-1).log_().add_(total)
            empty = highest == -torch.inf
            everything[:, start:last] = total.masked_fill_(empty, -torch.inf)
            matching[:, start:last] = of_target.masked_fill_(empty, -torch.inf)
        ctx.save_for_backward(queries, keys, targets, values, everything, matching)
        ctx.sight, ctx.far = sight, far
        return everything, matching

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, targets, values, everything, matching = ctx.saved_tensors
        to_queries, to_keys = torch.zeros_like(queries), torch.zeros_like(keys)
        empty = everything == -torch.inf
        to_all, to_target = gradients[0].masked_fill(empty, 0), gradients[1].masked_fill(matching == -torch.inf, 0)
        to_both = to_all + to_target * (everything - matching).masked_fill_(matching == -torch.inf, 0).exp_()
        for start, last, scores, match in _blocks(queries, keys, targets, values, ctx.sight):
            rows = slice(start, last)
            weights = scores.softmax(-1).masked_fill_(empty[:, rows, None], 0)
            if ctx.far:
                weights = weights.mul_(to_all[:, rows, None])
                _Few(match).add_shares_(weights, scores, matching[:, rows], to_target[:, rows])
            else:
                weights = weights.mul_(torch.where(match, to_both[:, rows, None], to_all[:, rows, None]))
            end = weights.shape[-1]
            to_queries[:, rows] = weights @ keys[:, :end]
            if ctx.needs_input_grad[1]:
                to_keys[:, :end].baddbmm_(weights.transpose(1, 2), queries[:, rows])
        return to_queries, to_keys, None, None, None


def _far_apart(queries: Tensor, keys: Tensor, temperature: float = 1.0) -> bool:
    """Whether two similarities may be so different that the share of the smaller one is no number but 0."""
    if not queries.numel() or not keys.numel():
        return False
    furthest = 2 * queries.norm(dim=-1).max() * keys.norm(dim=-1).max() / temperature
    return bool(furthest > -math.log(torch.finfo(queries.dtype).tiny) - 10)


class _Few:
    """The pairs of a block that have the target of a context, one by one: their mass beside itself alone.

    Takes longer than a sum of shares, and is right where these are too small for a number.
    """

    def __init__(self, match: Tensor) -> None:
        self.places = match.flatten().nonzero().squeeze(-1)  # in scores (R, contexts, pairs)
        self.shape = match.shape[:-1]
        self.contexts = self.places // match.shape[-1]

    def logsumexp(self, scores: Tensor, temperature: float = 1.0) -> Tensor:
        """Of the scores (R, contexts, pairs) divided by a temperature, over these pairs: (R, contexts)."""
        few = scores.flatten()[self.places] / temperature
        highest = scores.new_full((self.shape.numel(),), -torch.inf).scatter_reduce_(0, self.contexts, few, "amax")
        highest.clamp_(min=torch.finfo(scores.dtype).min)
        total = torch.zeros_like(highest).index_add_(0, self.contexts, (few - highest[self.contexts]).exp_())
        return (total.log_() + highest).view(self.shape)

    def add_shares_(self, weights: Tensor, scores: Tensor, totals: Tensor, gradients: Tensor) -> None:
        """Adds to `weights` the share of each of these pairs in their context's total, times the gradient of that."""
        few, totals = scores.flatten()[self.places], totals.flatten()[self.contexts]
        shares = (few - totals).exp_().masked_fill_(few == -torch.inf, 0).mul_(gradients.flatten()[self.contexts])
        weights.view(-1).index_add_(0, self.places, shares)


def _blocks(queries: Tensor, keys: Tensor, targets: Tensor, values: Tensor, sight: Own | Past) -> Any:
    """The scores (R, contexts, pairs), -inf where a pair is not seen, and which pairs have the target, by block."""
    rows, contexts = targets.shape
    pairs = values.shape[1]
    if not pairs:
        return
    nothing = values == NOTHING
    some_nothing = bool(nothing.any())
    step = max(1, BLOCK // (rows * pairs))
    for start in range(0, contexts, step):
        last = min(start + step, contexts)
        end = sight.end(last, pairs)
        scores = queries[:, start:last] @ keys[:, :end].transpose(1, 2)
        sight.hide(scores, start, last)
        if some_nothing:
            scores.masked_fill_(nothing[:, None, :end], -torch.inf)
        yield start, last, scores, targets[:, start:last, None] == values[:, None, :end]


@torch.no_grad()
def masses(
    queries: Tensor,
    keys: Tensor,
    targets: Tensor,
    values: Tensor,
    sight: Own | Past,
    temperatures: tuple[float, ...],
    rings: Tensor | None = None,
    count: int = 1,
) -> Mass:
    """`mass` for several temperatures at once and for each of `count` rings of pairs: (temperatures, rings, R, N).

    rings: (R, M), the ring of each pair, or None if all are in the first. For testing: without gradient.
    """
    dtype = queries.dtype
    shape = (len(temperatures), count, *targets.shape)
    everything, matching = (torch.full(shape, -torch.inf, dtype=dtype, device=queries.device) for _ in range(2))
    far = _far_apart(queries, keys, min(temperatures))
    for start, last, scores, match in _blocks(queries, keys, targets, values, sight):
        few = _Few(match) if far else None
        for ring in range(count):
            inside = scores
            if rings is not None:
                inside = scores.masked_fill((rings != ring)[:, None, : scores.shape[-1]], -torch.inf)
            highest = inside.amax(-1, keepdim=True).clamp(min=torch.finfo(inside.dtype).min)
            below = inside - highest
            for number, temperature in enumerate(temperatures):
                weights, top = (below / temperature).exp_(), highest.squeeze(-1) / temperature
                everything[number, ring, :, start:last] = weights.sum(-1).log_() + top
                of_target = few.logsumexp(inside, temperature) if few else weights.mul_(match).sum(-1).log_() + top
                matching[number, ring, :, start:last] = of_target
    return Mass(everything, matching)


def mass_of_found(scores: Tensor, targets: Tensor, values: Tensor, mask: Tensor) -> Mass:
    """The mass of pairs (..., K) that were found for each context by itself, where `mask` is true."""
    scores = scores.masked_fill(~mask, -torch.inf)
    return Mass(scores.logsumexp(-1), scores.masked_fill(values != targets.unsqueeze(-1), -torch.inf).logsumexp(-1))


# The probability of the target


def joint_loss(losses: Tensor, normalisers: Tensor, memory: Mass) -> Tensor:
    """-log P of Eq. 5 and 6, from the model's own losses -log softmax(target) and the logarithms of its normalisers.

    With an adaptive softmax the normaliser is that of its head: words of the tail keep their cluster's mass.
    """
    own = normalisers - losses  # the logarithm of the target's own mass
    return losses + F.softplus(memory.all - normalisers, threshold=50) - F.softplus(memory.target - own, threshold=50)


def mixed_loss(losses: Tensor, memory: Mass, weight: float) -> Tensor:
    """-log((1 - lambda) P + lambda P') of Eq. 9; where the memory is empty, P alone."""
    mixed = -torch.logaddexp(math.log1p(-weight) - losses, math.log(weight) + memory.target - memory.all)
    return torch.where(memory.all == -torch.inf, losses, mixed)


# All probabilities


def spread(scores: Tensor, values: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The logarithms of the memory's mass for each word of the vocabulary (..., V) and of all its mass (...).

    scores: (..., M), -inf where a pair is not seen; values: (..., M).
    """
    words = values.clamp(min=0).expand_as(scores)
    shape, least = (*scores.shape[:-1], vocabulary), torch.finfo(scores.dtype).min
    highest = scores.detach().new_full(shape, -torch.inf).scatter_reduce(-1, words, scores.detach(), "amax")
    highest = highest.clamp(min=least)
    sums = scores.new_zeros(shape).scatter_add(-1, words, (scores - highest.gather(-1, words)).exp())
    there = sums > 0
    return torch.where(there, sums.where(there, 1).log() + highest, -torch.inf), scores.logsumexp(-1)


def joint_distribution(log_probabilities: Tensor, normalisers: Tensor, memory: tuple[Tensor, Tensor]) -> Tensor:
    """log P of Eq. 6 over the vocabulary, from the model's own log P and normalisers and a `spread` memory."""
    masses, total = memory
    own, whole = log_probabilities + normalisers.unsqueeze(-1), torch.logaddexp(normalisers, total)
    return torch.logaddexp(own, masses) - whole.unsqueeze(-1)


def mixed_distribution(log_probabilities: Tensor, memory: Tensor, weight: float | Tensor) -> Tensor:
    """log((1 - lambda) P + lambda P') of Eq. 9 over the vocabulary, from log P and log P'."""
    weight = torch.as_tensor(weight, dtype=memory.dtype, device=memory.device)
    return torch.logaddexp((1 - weight).log() + log_probabilities, weight.log() + memory)


def together(recent: Mass | None, external: Mass | None, share: float | None = None) -> Mass | None:
    """Recent and external memory as one; with a `share` of the recent one, as a mixture of two distributions."""
    if recent is None or external is None:
        return recent or external
    return recent + external if share is None else blended(recent, external, share)


def blended(recent: Mass, external: Mass, share: float) -> Mass:
    """Two distributions of their own as one, the first with this share; where one is empty, the other alone."""
    there = [part.all > -torch.inf for part in (recent, external)]
    shares = torch.where(there[1], torch.where(there[0], share, 0.0), 1.0)
    parts = [
        torch.where(one, part.target - part.all.masked_fill(~one, 0), -torch.inf)
        for part, one in zip((recent, external), there, strict=True)
    ]
    target = torch.logaddexp(parts[0] + shares.log(), parts[1] + (1 - shares).log())
    return Mass(torch.where(there[0] | there[1], 0.0, -torch.inf), target)
