"""How a product-key memory is used: the counts and figures of arXiv 2010.03881, section 3.2.

u'_i = how often slot i was among the k of a head      t'_i = how often it was the best of them
w'_i = the sum of its weights                          u, t, w: the same, so that they sum to 1

MU = share of slots with u_i > 0                       KL_u = log |K| + sum_i u_i log u_i
top-1 MU = share of slots with t_i > 0                 KL_w = log |K| + sum_i w_i log w_i
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Counts:
    """u', t' and w' of one layer, (heads, slots) each."""

    reads: Tensor
    tops: Tensor
    weights: Tensor

    @classmethod
    def zeros(cls, heads: int, slots: int) -> Counts:
        """Nothing read yet."""
        return cls(*(torch.zeros(heads, slots, dtype=kind) for kind in (torch.int64, torch.int64, torch.float64)))

    def add(self, slots: Tensor, weights: Tensor) -> None:
        """Counts what tokens read: slots and weights (N, heads, k)."""
        heads, size = self.reads.shape
        places = slots.detach().cpu() + size * torch.arange(heads)[:, None]
        every = places.flatten()
        self.reads.view(-1).index_add_(0, every, torch.ones_like(every))
        self.weights.view(-1).index_add_(0, every, weights.detach().flatten().double().cpu())
        best = places.gather(-1, weights.detach().cpu().argmax(-1, keepdim=True)).flatten()
        self.tops.view(-1).index_add_(0, best, torch.ones_like(best))

    def figures(self) -> dict[str, float]:
        """MU, top-1 MU, KL_u and KL_w of all heads together, and how many reads were counted."""
        reads, tops, weights = (counts.sum(0) for counts in (self.reads, self.tops, self.weights))
        return _figures(reads, tops, weights)

    def by_head(self) -> list[dict[str, float]]:
        """The same for each head alone."""
        return [_figures(*counts) for counts in zip(self.reads, self.tops, self.weights, strict=True)]


class Usage:
    """The counts of each layer with a memory, by its number."""

    layers: dict[int, Counts]

    def __init__(self, layers: list[int], heads: int, slots: int) -> None:
        self.layers = {layer: Counts.zeros(heads, slots) for layer in layers}

    def add(self, layer: int, slots: Tensor, weights: Tensor) -> None:
        """Counts what tokens read in a layer."""
        self.layers[layer].add(slots, weights)

    def figures(self) -> dict[int, dict[str, float]]:
        """MU, top-1 MU, KL_u and KL_w of each layer."""
        return {layer: counts.figures() for layer, counts in self.layers.items()}


def _figures(reads: Tensor, tops: Tensor, weights: Tensor) -> dict[str, float]:
    return {
        "usage": (reads > 0).double().mean().item(),
        "top1_usage": (tops > 0).double().mean().item(),
        "kl_reads": from_uniform(reads),
        "kl_weights": from_uniform(weights),
        "reads": int(reads.sum()),
    }


def from_uniform(counts: Tensor) -> float:
    """The KL divergence of counts, as shares, from equal ones; 0 for no counts at all."""
    total = counts.sum().item()
    if not total:
        return 0.0
    shares = counts.double() / total
    return math.log(len(counts)) + torch.xlogy(shares, shares).sum().item()
