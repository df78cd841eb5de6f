"""Where a store is worth a search: a linear estimate of what it gains, from the key of a context.

Searching is what makes an external memory slow, and for most contexts the rows found change nothing (He, Neubig,
Berg-Kirkpatrick 2021, arXiv 2109.04212). The key is there anyway and knows how sure the model is, so that one product
with a vector, learned from the gains on a development set, tells the contexts apart.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mnemic.errors import UsageError

PENALTY = 1e-3  # of the ridge regression, relative to the mean variance of a key's numbers


class Gate(nn.Module):
    """Says for which keys (N, d) the store is to be searched: (N,). Until it has learned, for all."""

    direction: Tensor
    threshold: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("direction", torch.zeros(width))
        self.register_buffer("threshold", torch.tensor(-torch.inf))

    def forward(self, keys: Tensor) -> Tensor:
        """Where a search is expected to pay."""
        return keys @ self.direction.to(keys) > self.threshold.to(keys)

    @torch.no_grad()
    def learn(self, keys: Tensor, gains: Tensor, share: float) -> None:
        """Learns from the gains (N,) of a search for keys (N, d), to let that share of them through."""
        if len(keys) < 2:
            raise UsageError("a gate learns from the tokens of a development set: give more text")
        keys, gains = keys.double(), gains.double()
        centred = keys - keys.mean(0)
        squares = centred.T @ centred
        penalty = PENALTY * squares.diagonal().mean().clamp(min=1e-12)
        squares.diagonal().add_(penalty)
        direction = torch.linalg.solve(squares, centred.T @ (gains - gains.mean()))
        expected = (keys.to(self.direction) @ direction.to(self.direction)).sort(descending=True).values
        through = min(max(round(share * len(keys)), 0), len(keys) - 1)
        self.direction.copy_(direction)
        self.threshold.copy_(expected[through])
