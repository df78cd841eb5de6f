"""The mathematics of memory tokens, in plain torch (Memory Transformer, arXiv 2006.11527, section 2.2).

    X^{mem+seq} = [X^mem ; X^seq]        X^mem: (m, d), trained;  X^seq: (n, d)

The extended sequence goes through the model's own layers. With a gate g_j for each memory token, its weight in every
softmax is multiplied by g_j:

    A_ij = g_j exp(s_ij) / (sum_{k in mem} g_k exp(s_ik) + sum_{k in seq} exp(s_ik))

which is log g_j added to the score s_ij. At g = 0 the sequence does not read the memory.

Table 5's "+pool" labels a whole text by the outputs h_1, ..., h_m of the last layer for the memory:

    logits = W [max_j h_j ; mean_j h_j] + b        W: (labels, 2d);  max and mean for each of the d numbers
"""

from __future__ import annotations

import torch
from torch import nn

CLOSED = (
    1e-20  # the gate's start: no mass that a float32 sum would show, yet d log g / d g = 1 / g keeps the gradient whole
)


class MemoryTokenLayer(nn.Module):
    """m distinct trainable vectors of width d, drawn with the spread of the model's own embeddings."""

    def __init__(self, count: int, width: int, spread: float = 0.02, gated: bool = False) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(count, width) * spread)
        self.gate = nn.Parameter(torch.full((count,), CLOSED)) if gated else None

    def forward(self) -> torch.Tensor:
        """X^mem, (m, d)."""
        return self.vectors

    def bias(self) -> torch.Tensor | None:
        """log g, (m,): what is added to the scores of the memory's keys; None without a gate.

        Below CLOSED the value stays at log CLOSED while the gradient passes, so that a gate can always open.
        """
        if self.gate is None:
            return None
        gate = self.gate.float()
        opening = gate.detach().clamp(min=CLOSED)
        return opening.log() + (gate - gate.detach()) / opening


class PooledHead(nn.Module):
    """Labels of whole texts from what the last layer gives for their memory."""

    def __init__(self, width: int, labels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width, labels)

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        """(B, m, d) -> logits (B, labels)."""
        pooled = torch.cat([memory.amax(dim=1), memory.mean(dim=1)], dim=-1)
        return self.classifier(self.dropout(pooled.to(self.classifier.weight.dtype))).to(memory.dtype)
