"""The mathematics of attention to a memory (arXiv 2203.08913, section 3), in plain torch.

B rows, H heads, T queries, k retrieved pairs, d the width of a head. A pair that was not found (`found` is false) takes
no part; a query that found none is left with its local result, whatever the gate says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PACE = 10.0
BLOCK = 4096  # pairs that dense attention weighs at a time


class MemoryMix(nn.Module):
    """What one layer learns: how sharply each head looks into the memory, and how much it takes of what it finds.

    b, which decides on the latter, is a parameter times PACE: an optimiser that moves all weights alike would take
    thousands of steps to open or close a gate.
    """

    def __init__(self, heads: int, mix: str, scale: float) -> None:
        super().__init__()
        self.mix = mix
        self.log_scale = nn.Parameter(torch.full((heads,), scale).log())
        self.gate = nn.Parameter(torch.zeros(heads))

    def scale(self) -> Tensor:
        """What scores of normalised queries and keys are multiplied with, (H,)."""
        return self.log_scale.exp()

    def bias(self) -> Tensor:
        """b of each head, (H,)."""
        return PACE * self.gate

    def share(self, memory_mass: Tensor, local_mass: Callable[[], Tensor]) -> Tensor:
        """The memory's share of each head's result, (H, 1) or (B, H, T); masses are logarithms of sums of exp(score).

        gate: g = sigmoid(b), as in the paper. tanh: g = tanh(b), which starts at zero. joint: that of one softmax over
        local and retrieved pairs, the retrieved ones raised by b.
        """
        if self.mix == "gate":
            return self.bias().sigmoid()[:, None]
        if self.mix == "tanh":
            return self.bias().tanh()[:, None]
        return (memory_mass + self.bias()[:, None] - local_mass()).sigmoid()


def unit(states: Tensor) -> Tensor:
    """Vectors of length 1."""
    return F.normalize(states, dim=-1)


def attend_to_pairs(queries: Tensor, keys: Tensor, values: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of each query (..., T, d) to its own pairs (..., T, k, d): the result, and its mass (..., T).

    No gradient goes to the pairs; through the scores it goes to the queries. Pairs that were not found are weighed with
    0, and must be finite.
    """
    scores = (queries.unsqueeze(-2) @ keys.transpose(-1, -2)).squeeze(-2).masked_fill(~found, -torch.inf)
    none = ~found.any(-1, keepdim=True)
    mass = scores.masked_fill(none, 0).logsumexp(-1)  # 0: of -inf alone the gradient would be no number
    weights = (scores - mass.unsqueeze(-1)).exp()
    return (weights.unsqueeze(-2) @ values).squeeze(-2), mass


def attend_to_all(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries (H, T, d) to the same pairs (H, n, d), all of them: the result, and its mass (H, T).

    Blocks of pairs are weighed one after the other; their scores are formed again for the gradient.
    """
    parts = [
        checkpoint(_attend_to_block, queries, k, v, use_reentrant=False)
        for k, v in zip(keys.split(BLOCK, 1), values.split(BLOCK, 1), strict=True)
    ]
    return together(torch.stack([result for result, _ in parts]), torch.stack([mass for _, mass in parts]))


def together(results: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to n sets of pairs, (n, H, T, d), as one, by the mass of each, (n, H, T), -inf where it has none."""
    none = (masses == -torch.inf).all(0)
    mass = masses.masked_fill(none, 0).logsumexp(0)  # 0: of -inf alone the gradient would be no number
    return ((masses - mass).exp().unsqueeze(3) * results).sum(0), mass


def _attend_to_block(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    scores = queries @ keys.transpose(1, 2)
    mass = scores.logsumexp(-1)
    return (scores - mass.unsqueeze(2)).exp() @ values, mass


def local_mass(
    queries: Tensor, keys: Tensor, bias: Tensor | None, mask: Tensor | None, scaling: float, causal: bool
) -> Tensor:
    """The mass of attention within the context, (B, H, T), for keys (B, H, K, d) and a bias of their scores.

    Where there is no mask, query number t of a causal attention sees the keys up to number t, as in torch's own.
    """
    scores = queries @ keys.transpose(2, 3) * scaling
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    elif causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.logsumexp(-1)


def mixed(local: Tensor, memory: Tensor, share: Tensor, found: Tensor) -> Tensor:
    """share * memory + (1 - share) * local, (B, H, T, d) each; local alone where nothing was found (B, H, T)."""
    share = torch.where(found, share, 0.0)
    return torch.lerp(local, memory.to(local.dtype), share.unsqueeze(-1).to(local.dtype))
