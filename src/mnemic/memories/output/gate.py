"""Where a store is worth a search: a linear estimate of what it gains, from the key of a context.

Searching is what makes an external memory slow, and for most contexts the rows found change nothing (He, Neubig,
Berg-Kirkpatrick 2021, arXiv 2109.04212). The key is there anyway and knows how sure the model is, so that one product
with a vector, learned from the gains on a development set, tells the contexts apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mnemic.errors import UsageError

PENALTY = 3.0  # of the ridge regression, in mean variances of a key's numbers; with much less the noise is learned


class Gate(nn.Module):
    """Says for which keys (N, d) the store is to be searched: (N,)."""

    direction: Tensor  # (d,); of no width until it has learned
    threshold: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("direction", torch.zeros(0))
        self.register_buffer("threshold", torch.zeros(()))

    def forward(self, keys: Tensor) -> Tensor:
        """Where a search is expected to pay."""
        if not len(self.direction):
            raise UsageError(
                "retrieve is below 1 and its gate has not learned yet where the store pays: tune the memory first "
                "(mnemic.tune(...).put_into(model), or `mnemic evaluate --tune`), or set retrieve = 1"
            )
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
        direction = torch.linalg.solve(squares, centred.T @ (gains - gains.mean())).to(self.direction)
        expected = (keys.to(direction) @ direction).sort(descending=True).values
        self.direction = direction
        self.threshold = expected[min(max(round(share * len(keys)), 0), len(keys) - 1)].clone()

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        if (saved := state.get(prefix + "direction")) is not None:
            self.direction = self.direction.new_zeros(saved.shape)
        super()._load_from_state_dict(state, prefix, *rest)
