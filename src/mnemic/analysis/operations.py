"""What a head does with memory tokens, found in its attention weights: write, store, fusion, copy, read.

The operations are those that section 3.2 of arXiv 2006.11527 finds by eye. A row of weights A_i belongs to what is
updated, a column to what it takes from; with m memory tokens first in rows and columns, A has four blocks (Figure 3):

    process  memory rows, memory keys        write   memory rows, sequence keys
    read     sequence rows, memory keys      update  sequence rows, sequence keys

Every measure is a number from 0 to 1 for each layer and head: a mean over rows, so that the parts of a memory that are
used in different ways add up. Attention that is even is none of the operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = ("write", "store", "fusion", "copy", "read")
CLEAR = 0.1  # an operation that is weaker than this is not named
NONE = "none"
_TINY = 1e-12


def blocks(weights: Tensor, memory_queries: int, memory_keys: int) -> dict[str, Tensor]:
    """The four blocks of Figure 3, each (layers, heads, its rows, its keys)."""
    memory, sequence = weights[..., :memory_queries, :], weights[..., memory_queries:, :]
    return {
        "update": sequence[..., memory_keys:],
        "write": memory[..., memory_keys:],
        "read": sequence[..., :memory_keys],
        "process": memory[..., :memory_keys],
    }


def measures(weights: Tensor, memory_queries: int, memory_keys: int, seen: Tensor | None = None) -> dict[str, Tensor]:
    """Every measure of this file, by name, (layers, heads) each; 0 for what a stack cannot do.

    seen: in how many places a row sees a key, (queries, keys) or so in each layer; one for all if it is left out. What
    sees one key alone has no choice, and no part in the means of what memory tokens do with each other.
    """
    seen = torch.ones(weights.shape[-2:]) if seen is None else seen
    seen = seen.to(weights.device).expand(len(weights), *weights.shape[-2:])[:, None]  # of all heads
    cut, places = blocks(weights, memory_queries, memory_keys), blocks(seen.double(), memory_queries, memory_keys)
    cut = {name: cut[name].double() for name in ("write", "process", "read")}  # the largest block is not measured
    found = {name: _mean_of_rows(block.sum(-1)) for name, block in cut.items()}
    all_seen = {"write": seen[..., :memory_queries, :].sum(-1), "read": seen[..., memory_queries:, :].sum(-1)}
    for name, many in all_seen.items():
        found[f"{name}_strength"] = _mean_of_rows(chosen(cut[name], places[name], many.double()))
    choose = all_seen["write"] > 1
    rows, seen = weights[..., :memory_queries, :].double(), seen[..., :memory_queries, :].double()
    for name, value in _processing(rows, cut["process"], seen).items():
        found[name] = (value * choose).sum(-1) / choose.sum(-1).clamp(min=1)
    return {name: value.clamp(0, 1) for name, value in found.items()}


def _processing(rows: Tensor, process: Tensor, seen: Tensor) -> dict[str, Tensor]:
    """The measures of what memory tokens do with each other, (layers, heads, memory rows) each."""
    if not rows.shape[-2]:  # a stack in which no memory token is updated
        return dict.fromkeys(("store", "fusion", "copy", "copy_kept", "copy_reversed", "copy_same"), rows.sum(-1))
    places = seen[..., : process.shape[-1]]
    even = background(process, places)
    above = (process - even * places).clamp(min=0)
    common = _common(above, places)
    once = rows - even * (seen - 1).clamp(min=0)  # what a key has in a second place is no sharper for it
    kept, turned, same = copies(once, above, common)
    return {
        "store": stores(once, common),
        "fusion": fusions(above, common),
        "copy": torch.maximum(torch.maximum(kept, turned), same),
        "copy_kept": kept,
        "copy_reversed": turned,
        "copy_same": same,
    }


def strengths(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """How much there is of each operation, comparable with each other."""
    return {name: found.get(f"{name}_strength", found[name]) for name in OPERATIONS}


def strongest(found: dict[str, float]) -> str:
    """The name of the operation there is most of; "none" if none is clear."""
    name = max(found, key=lambda operation: found[operation])
    return name if found[name] >= CLEAR else NONE


def chosen(block: Tensor, places: Tensor, many: Tensor) -> Tensor:
    """How much each row prefers the keys of a block to all that it sees, in N places (`many`, one number a row).

        chosen_i = (sum_j W_ij log(N W_ij / p_ij))_+ / log N        j: the keys of the block, seen in p_ij `places`
        W_ij = (A_ij - c_j)_+

    With W = A it would be the block's part of the distance (Kullback and Leibler's) between the row and an even one, as
    a share of the largest there is: 1 if all weight is on one key of the block, 0 if the block has no more than in an
    even row. c_j is what most rows give to a key beyond that, `_common`.
    """
    even = places / many[..., None].clamp(min=1)  # 1 in a row that sees one key: it has no choice
    left = (block - _common((block - even).clamp(min=0), places)).clamp(min=0)
    distance = torch.xlogy(left, left / even.clamp(min=_TINY)).sum(-1)
    return distance.clamp(min=0) / many.clamp(min=2).log()


def _mean_of_rows(found: Tensor) -> Tensor:
    """The mean of what each row has, (layers, heads); 0 where there are no rows."""
    return found.sum(-1) / max(found.shape[-1], 1)


def sharpest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The key with the largest weight in each row, and the margin: how far it is above the second largest."""
    if rows.shape[-1] < 2:
        return torch.zeros(rows.shape[:-1], dtype=torch.long, device=rows.device), torch.zeros_like(rows.sum(-1))
    top = rows.topk(2, dim=-1)
    return top.indices[..., 0], top.values[..., 0] - top.values[..., 1]


def background(process: Tensor, places: Tensor) -> Tensor:
    """b_i, what a row gives to a memory key in each place where it is without choosing it: (layers, heads, rows, 1).

    It is the mean over those memory keys that have no more than the mean of all. E_ij = (A_ij - b_i p_ij)_+ is what a
    key has above it, 0 where the row is even.
    """
    mean = process.sum(-1, keepdim=True) / places.sum(-1, keepdim=True).clamp(min=1)
    low = process <= mean * places * (1 + 1e-6)  # with room for rounding: in an even row all weights are the mean
    return (process * low).sum(-1, keepdim=True) / (places * low).sum(-1, keepdim=True).clamp(min=1)


def shared(weights: Tensor) -> Tensor:
    """min(S, 2 (S - max)), S the sum of weights: all of it where no key has more than half, nothing if it is one key's.

    It is the weight that can be paired with weight on another key.
    """
    if not weights.shape[-1]:
        return weights.sum(-1)
    total = weights.sum(-1)
    return torch.minimum(total, 2 * (total - weights.amax(-1)))


def stores(rows: Tensor, common: Tensor) -> Tensor:
    """store_i = (A_ii - max_{j != i} A_ij - c_i)_+: a sharp diagonal, by which a memory token is added to itself.

    c_i is what most rows give to that token alike, `common`.
    """
    key, margin = sharpest(rows)
    itself = key == torch.arange(rows.shape[-2], device=rows.device)
    return ((margin - common[..., 0, :]) * itself).clamp(min=0)


def fusions(above: Tensor, common: Tensor) -> Tensor:
    """fusion_i = shared((E_ij - c_j)_+, |i - j| <= 1): a soft diagonal, by which neighbours are summed."""
    places = torch.arange(above.shape[-1], device=above.device)
    near = (places[:, None] - places).abs() <= 1
    return shared((above - common).clamp(min=0) * near)


def copies(rows: Tensor, above: Tensor, common: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How much each memory row copies from other memory tokens as the row before or after it does, in three ways.

    With t_i the key of a row's largest weight and s_i its margin, for the rows i and i' = i + 1:

        order kept       min(s_i, s_i')   if t_i' = t_i + 1 and t_i != i: a shifted diagonal
        order reversed   min(s_i, s_i')   if t_i' = t_i - 1 and t_i != i: an antidiagonal
        the same values  shared(min(F_ij, F_i'j) over j),  F_ij = (E_ij - min(E_ji, E_ii) - c_j)+: a vertical block

    F leaves out what tokens that take from themselves take from each other, too: that is a sum, with no source to copy
    from. A line of one key is no copy.
    """
    count = rows.shape[-2]
    key, margin = sharpest(rows)
    pairs = torch.minimum(margin[..., 1:], margin[..., :-1]) * (key < count)[..., 1:] * (key < count)[..., :-1]
    step = key.diff(dim=-1)
    others = key != torch.arange(count, device=rows.device)
    itself = above.diagonal(dim1=-2, dim2=-1)[..., None]
    one_way = (above - torch.minimum(above.mT, itself) - common).clamp(min=0)
    same = shared(torch.minimum(one_way[..., 1:, :], one_way[..., :-1, :]))
    return _of_rows(pairs * (step == 1)) * others, _of_rows(pairs * (step == -1)) * others, _of_rows(same)


def _common(above: Tensor, places: Tensor) -> Tensor:
    """c_j, what at least three quarters of the rows that see a key give to it: (layers, heads, 1, keys).

    Vertical lines through all rows are no operation: they are what heads look like that are passed by (section A.2).
    Where one row alone sees a key there is nothing in common.
    """
    rows = (places > 0).sum(-2)
    if not above.shape[-1] or not above.shape[-2]:
        return above.new_zeros(*above.shape[:-2], 1, above.shape[-1])
    ordered = above.masked_fill(places == 0, torch.inf).sort(dim=-2).values
    rows = rows[..., None, :].expand(*above.shape[:-2], 1, -1)
    return ordered.gather(-2, rows // 4).masked_fill(rows < 2, 0)


def _of_rows(pairs: Tensor) -> Tensor:
    """A number for each pair of neighbouring rows becomes one for each row: the larger of its two pairs'."""
    return torch.maximum(F.pad(pairs, (1, 0)), F.pad(pairs, (0, 1)))
