"""The mathematics of memory tokens, in plain torch (Memory Transformer, arXiv 2006.11527, section 2).

    X^{mem+seq} = [X^mem ; X^seq]        X^mem: (m, d), trained;  X^seq: (n, d)

**MemTransformer** (2.2): the extended sequence goes through the model's own layers. With a gate g_j for each memory
token, its weight in every softmax is multiplied by g_j:

    A_ij = g_j exp(s_ij) / (sum_{k in mem} g_k exp(s_ik) + sum_{k in seq} exp(s_ik))

which is log g_j added to the score s_ij. At g = 0 the sequence does not read the memory.

**MemCtrl** (2.3): in each layer the memory is updated by a controller, and the sequence by the model's own layer, both
from X^{mem+seq}:

    A^mem = LN(X^mem + MH^mem(X^mem, X^{mem+seq}, X^{mem+seq}))        H^mem = LN(A^mem + FF^mem(A^mem))

**MemBottleneck** (2.4): the memory is updated so, and then the sequence reads nothing but the updated memory:

    A^seq = LN(X^seq + MH^seq(X^seq, H^mem, H^mem))                    H^seq = LN(A^seq + FF^seq(A^seq))

Skip leaves the sequence as it is: H^seq = X^seq.

**Recurrent memory** (beyond the paper; arXiv 2207.06881): in a causal model the memory of segment t stands behind it,
too, where it reads all of it, and what the last layer gives there, H_t, goes before the next segment:

    [.. ; .. ; H_t] = model([X^mem_t ; X^seq_t ; X^mem_t])
    X^mem_{t+1} = X^mem + s * H_t / rms(H_t)        X^mem_1 = X^mem;  s: (d,), trained;  rms over the d numbers

H_t as it is would be many times as large as embeddings are, and drown the text until a model has learned to read it:
s starts at the size of embeddings.

Table 5's "+pool" labels a whole text by the outputs h_1, ..., h_m of the last layer for the memory:

    logits = W [max_j h_j ; mean_j h_j] + b        W: (labels, 2d);  max and mean for each of the d numbers
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLOSED = (
    1e-20  # the gate's start: no mass that a float32 sum would show, yet d log g / d g = 1 / g keeps the gradient whole
)


class MemoryTokenLayer(nn.Module):
    """m distinct trainable vectors of width d, drawn with the spread of the model's own embeddings."""

    def __init__(
        self, count: int, width: int, spread: float = 0.02, gated: bool = False, recurrent: bool = False
    ) -> None:
        super().__init__()
        self.spread = spread
        self.vectors = nn.Parameter(torch.randn(count, width) * spread)
        self.gate = nn.Parameter(torch.full((count,), CLOSED)) if gated else None
        self.scale = nn.Parameter(torch.full((width,), spread)) if recurrent else None

    def forward(self) -> Tensor:
        """X^mem, (m, d)."""
        return self.vectors if self.scale is None else self.vectors + 0 * self.scale  # it takes part, with no gradient

    def following(self, written: Tensor) -> Tensor:
        """X^mem_{t+1} (B, m, d) from H_t (B, m, d)."""
        return self.vectors + self.scale * F.rms_norm(written, written.shape[-1:])  # type: ignore[operator]

    def bias(self) -> Tensor | None:
        """log g, (m,): what is added to the scores of the memory's keys; None without a gate.

        Below CLOSED the value stays at log CLOSED while the gradient passes, so that a gate can always open.
        """
        if self.gate is None:
            return None
        gate = self.gate.float()
        opening = gate.detach().clamp(min=CLOSED)
        return opening.log() + (gate - gate.detach()) / opening

    @torch.no_grad()
    def redraw(self) -> None:
        """Draws all tokens anew."""
        self.vectors.copy_(torch.randn_like(self.vectors) * self.spread)

    def resize(self, count: int) -> None:
        """Leaves the last `count` tokens, which stay where they stand before a text, or puts new ones before them.

        New ones are drawn as those at the start were. For each number of tokens that were there it is another draw, or
        they would be copies of these wherever the generator is seeded again.
        """
        old, kept = self.vectors.detach(), slice(max(len(self.vectors) - count, 0), None)
        draw = torch.Generator().manual_seed(int(torch.randint(2**62, ())) + len(old))
        new = torch.randn(max(count - len(old), 0), old.shape[1], generator=draw).to(old) * self.spread
        self.vectors = nn.Parameter(torch.cat([new, old[kept]]), self.vectors.requires_grad)
        if self.gate is not None:
            closed, gate = self.gate.new_full((len(new),), CLOSED), self.gate.detach()
            self.gate = nn.Parameter(torch.cat([closed, gate[kept]]), self.gate.requires_grad)


class MemoryAttention(nn.Module):
    """MH(Q, X, X): multi-head attention of some vectors to others, without positions."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * head_dim
        self.query, self.key_value = nn.Linear(width, inner), nn.Linear(width, 2 * inner)
        self.out = nn.Linear(inner, width)

    def forward(self, queries: Tensor, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """What queries (B, m, d) find in states (B, K, d), of which a mask (B or 1, 1, 1, K) hides some."""
        query, key, value = self._heads(queries, states)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(found.transpose(1, 2).flatten(2))

    def weights(self, queries: Tensor, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """The weights (B, heads, m, K) with which `forward` sums up."""
        query, key, _ = self._heads(queries, states)
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1)

    def _heads(self, queries: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, (B, heads, m or K, head_dim)."""
        query = self.query(queries).unflatten(2, (self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(states).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return query, key, value


class MemoryController(nn.Module):
    """A layer of the memory's own: H^mem from X^mem and what it reads."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        hidden: int,
        activation: Callable[[Tensor], Tensor] = F.relu,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.attention_norm = MemoryAttention(width, heads, head_dim), nn.LayerNorm(width)
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)
        self.activation, self.dropout = activation, dropout
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, memory: Tensor, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """H^mem (B, m, d), where MH^mem reads states (B, K, d)."""
        memory = self.attention_norm(memory + self._drop(self.attention(memory, states, mask)))
        return self.norm(memory + self._drop(self.down(self.activation(self.up(memory)))))

    def _drop(self, added: Tensor) -> Tensor:
        return F.dropout(added, self.dropout, self.training)


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
