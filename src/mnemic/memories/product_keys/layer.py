"""The mathematics of product-key memory, in plain torch.

Large Memory Layers with Product Keys (arXiv 1907.05242), section 3, for one token x of width d:

    q_h = norm(W_h x + b_h)                                a query for each head h, cut into halves q_h1, q_h2
    s_h(i, j) = q_h1 . c_h1i + q_h2 . c_h2j                the score of slot (i, j): C sub-keys in each half, C^2 slots
    I_h = the k slots with the largest s_h                 exact: see `best_pairs`
    w_h = softmax of s_h over I_h
    PKM(x) = sum_h sum_{i in I_h} w_h(i) v_i               one table of values v for all heads

Large Product Key Memory for Pretrained Language Models (arXiv 2010.03881), section 4.2, puts it into a block as
x' = LN(x + a FFN(x) + b PKM(x)); that is done in `attach.py`.

Options that came later (arXiv 2412.09764): PKM'(x) = W_o (silu(W_g x) * PKM(x)), and s_h by cosines with a learned
scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# few enough at a time for the processor's cache
TOKENS = 1024  # whose slots are found
ROWS = 1024  # of a gradient that are summed up


class ProductKeyLayer(nn.Module):
    """Queries and keys of one layer: finds the slots that tokens read, and reads them from a table of values."""

    def __init__(
        self,
        width: int,
        slots: int,
        heads: int = 4,
        k: int = 32,
        key_dim: int = 256,
        norm: str = "batch",
        cosine: bool = False,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.k, self.codebook = heads, k, math.isqrt(slots)
        self.select: Callable[[Tensor, int], Tensor] = best_pairs
        self.query = nn.Linear(width, heads * key_dim)
        self.norm = {"batch": QueryBatchNorm, "layer": HeadLayerNorm, "none": NoNorm}[norm](heads, key_dim)
        self.keys = nn.Parameter(torch.empty(heads, 2, self.codebook, key_dim // 2))
        nn.init.uniform_(self.keys, -(key_dim**-0.5), key_dim**-0.5)
        self.scale = nn.Parameter(torch.full((heads,), 10.0)) if cosine else None
        self.gate = nn.Linear(width, width, bias=False) if gated else None
        self.out = nn.Linear(width, width, bias=False) if gated else None

    def forward(self, x: Tensor, values: ValueTable) -> Tensor:
        """PKM(x) for tokens (N, d)."""
        slots, weights = self.find(x)
        return self.finish(values(slots, weights), x)

    def find(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """I and w: the slots that each token reads in each head, and their weights, (N, heads, k) each."""
        queries = self.norm(self.query(x)).split(TOKENS)
        slots, weights = zip(*map(self._find, queries), strict=True)
        return torch.cat(slots), torch.cat(weights)

    def _find(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.keys.flatten(0, 1)
        halves = queries.unflatten(1, (len(keys), -1)).transpose(0, 1)  # (2 heads, N, key_dim / 2)
        if self.scale is not None:
            halves, keys = F.normalize(halves, dim=-1), F.normalize(keys, dim=-1)
        scores = (halves @ keys.transpose(1, 2)).unflatten(0, (self.heads, 2))  # of each sub-key: C numbers
        pairs = self.select(scores.detach(), self.k)
        slots, best = pairs[:, 0] * self.codebook + pairs[:, 1], scores.gather(-1, pairs).sum(1)
        if self.scale is not None:
            best = best * self.scale[:, None, None]
        return slots.transpose(0, 1), best.softmax(-1).transpose(0, 1)

    def finish(self, read: Tensor, x: Tensor) -> Tensor:
        """What was read as it goes back into the model: gated, if it is."""
        read = read.to(x.dtype)
        return read if self.gate is None or self.out is None else self.out(F.silu(self.gate(x)) * read)


def best_pairs(scores: Tensor, k: int) -> Tensor:
    """The pairs of sub-keys (i, j) with the k best sums of a score of the first half and one of the second.

    scores: (heads, 2, N, C); the pairs are (heads, 2, N, k), the best first.
    """
    codebook = scores.shape[-1]
    halves, places = scores.topk(min(k, codebook), dim=-1)
    first, second = useful_pairs(k, halves.shape[-1], scores.device)
    sums = halves[:, 0, :, first] + halves[:, 1, :, second]
    at = sums.topk(min(k, codebook**2), dim=-1).indices
    return places.gather(-1, torch.stack([first[at], second[at]], dim=1))


def useful_pairs(k: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The ranks, from 0, of those pairs of scores whose sum can be among the k best.

    A pair of the a-th best of one half and the b-th best of the other has a b - 1 pairs that are as good or better, so
    only pairs with a b <= k are looked at: about k log k of the k^2.
    """
    rank = torch.arange(1, ranks + 1, device=device)
    first, second = (rank[:, None] * rank <= k).nonzero(as_tuple=True)
    return first, second


class ValueTable(nn.Module):
    """The values: one row for each slot, of which a token reads few.

    The gradient is sparse: it has the rows that were read and no others. `sparse` says so to optimisers.
    A pruned table has rows for `kept` of its slots; the others add nothing.
    """

    sparse = True
    rows: Tensor | None  # (slots,): the row of each slot, -1 for none; None: each has its own
    learning: Tensor | None  # (slots,): which slots learn; None: all

    def __init__(
        self,
        slots: int,
        width: int,
        zeros: bool = False,
        kept: int | None = None,
        empty: Callable[..., Tensor] = torch.empty,
        **where: Any,
    ) -> None:
        super().__init__()
        self.slots, self.empty = slots, empty
        self.weight = nn.Parameter(empty(slots if kept is None else kept, width, **where))
        first = None if kept is None else torch.arange(slots, dtype=torch.int32, device=self.weight.device)
        self.register_buffer("rows", None if first is None else first.masked_fill(first >= len(self.weight), -1))
        self.register_buffer("learning", None, persistent=False)
        if zeros:
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, slots: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the rows that each token reads in all heads: (N, heads, k) to (N, d)."""
        slots, weights = slots.flatten(1), weights.flatten(1)
        learns = None if self.learning is None else self.learning[slots]
        if self.rows is not None:
            slots = self.rows[slots].long()
            there = slots >= 0
            slots, weights = slots.clamp(min=0), weights.masked_fill(~there, 0)
            learns = there if learns is None else learns & there
        return WeightedRows.apply(self.weight, slots, weights, learns, self.empty)

    def keep(self, kept: Tensor) -> None:
        """Drops the rows of all slots but these, (slots,)."""
        old = torch.arange(self.slots, device=kept.device) if self.rows is None else self.rows.long()
        kept = kept & (old >= 0)
        numbers = kept.cumsum(0, dtype=torch.int32) - 1
        self.rows = numbers.masked_fill(~kept, -1)
        self.weight = nn.Parameter(self.weight.detach()[old[kept]], requires_grad=self.weight.requires_grad)


class WeightedRows(torch.autograd.Function):
    """y_n = sum_j w_nj v_(i_nj), with a gradient of v that has one row for each slot that was read and learns.

    dL/dv_i = sum of w_nj dL/dy_n over all (n, j) that read slot i: the same weighted sum the other way round, of
    rows of dL/dy, so that nothing as large as (reads, d) or as the table is ever made.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, slots: Tensor, weights: Tensor, learns: Tensor | None, empty: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(values, slots, weights, learns)
        ctx.empty = empty
        return F.embedding_bag(slots, values, per_sample_weights=weights.to(values.dtype), mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        values, slots, weights, learns = ctx.saved_tensors
        for_values = for_weights = None
        if ctx.needs_input_grad[0]:
            rows, sums = _gradient_of_rows(slots, weights.to(grad.dtype), grad, learns, ctx.empty)
            for_values = torch.sparse_coo_tensor(
                rows[None], sums.to(values.dtype), values.shape, is_coalesced=True, check_invariants=False
            )
        if ctx.needs_input_grad[2]:
            for_weights = _products(values, slots, grad).to(weights.dtype)
        return for_values, None, for_weights, None, None


def _gradient_of_rows(
    slots: Tensor, weights: Tensor, grad: Tensor, learns: Tensor | None, empty: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """The rows that were read and learn, in order, and dL/dv of each."""
    ordered, order = slots.flatten().sort()
    if learns is not None:
        taught = learns.flatten()[order]
        ordered, order = ordered[taught], order[taught]
    rows, counts = torch.unique_consecutive(ordered, return_counts=True)
    tokens, weights = order // slots.shape[1], weights.flatten()[order]
    begins = counts.cumsum(0) - counts
    sums = empty(len(rows), grad.shape[1], dtype=grad.dtype, device=grad.device)
    firsts = begins[::ROWS].tolist()
    for number, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(tokens)], strict=False)):
        some, reads = slice(number * ROWS, (number + 1) * ROWS), slice(first, last)
        sums[some] = F.embedding_bag(
            tokens[reads], grad, begins[some] - first, per_sample_weights=weights[reads], mode="sum"
        )
    return rows, sums


def _products(values: Tensor, slots: Tensor, grad: Tensor) -> Tensor:
    """v_(i_nj) . dL/dy_n, (N, reads): the gradient that F.embedding_bag has for its weights."""
    tokens, reads = slots.shape
    begins = torch.arange(0, tokens * reads, reads, device=slots.device)
    bags = torch.arange(tokens, device=slots.device).repeat_interleave(reads)
    of_weights = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return of_weights(grad.to(values.dtype), values, slots.flatten(), begins, bags, 0).view_as(slots)


class QueryBatchNorm(nn.BatchNorm1d):
    """Normalises each number of the queries over the tokens of a batch; by what it has seen so far in evaluation.

    A token cannot be normalised alone, and a forward that is repeated for its gradient adds nothing to what was seen.
    Frozen, it goes by what was seen before in training too: queries stay what they are.
    """

    def __init__(self, heads: int, key_dim: int) -> None:
        super().__init__(heads * key_dim)

    def forward(self, queries: Tensor) -> Tensor:
        if not self.training:
            return super().forward(queries)
        if len(queries) < 2 or not self.weight.requires_grad:
            return F.batch_norm(queries, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if repeated():  # with copies, for checkpointing expects the same tensors to be saved as the first time
            mean: Any = self.running_mean
            var: Any = self.running_var
            return F.batch_norm(queries, mean.clone(), var.clone(), self.weight, self.bias, training=True, eps=self.eps)
        return super().forward(queries)


class HeadLayerNorm(nn.LayerNorm):
    """Normalises the query of each head by itself, so that no token depends on another one."""

    def __init__(self, heads: int, key_dim: int) -> None:
        super().__init__(key_dim)

    def forward(self, queries: Tensor) -> Tensor:
        return super().forward(queries.unflatten(1, (-1, *self.normalized_shape))).flatten(1)


class NoNorm(nn.Identity):
    """Leaves queries as they are."""

    def __init__(self, heads: int, key_dim: int) -> None:
        super().__init__()


def repeated() -> bool:
    """Whether a forward is run once more within a backward pass, as activation checkpointing does."""
    return torch._C._current_graph_task_id() != -1
