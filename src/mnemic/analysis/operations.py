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


def measures(
    weights: Tensor, memory_queries: int, memory_keys: int, causal: bool = False, behind: bool = False
) -> dict[str, Tensor]:
    """Every measure of this file, by name, (layers, heads) each; 0 for what a stack cannot do.

    The memory tokens of a causal stack see those before them alone, unless they stand `behind` the sequence, too. The
    first sees itself alone. It has no choice, so it has no part in the means.
    """
    rows = weights[..., :memory_queries, :].double()
    cut = blocks(weights, memory_queries, memory_keys)
    cut = {name: cut[name].double() for name in ("write", "process", "read")}  # the largest block is not measured
    found = {name: _mean_of_rows(block.sum(-1)) for name, block in cut.items()}
    alone = causal and not behind
    seen = torch.full((weights.shape[-2],), weights.shape[-1], device=weights.device)
    if causal:
        seen -= torch.arange(len(seen), device=seen.device).flip(0)
        seen[:memory_queries] = seen[:memory_queries] if alone else weights.shape[-1]
    found["write_strength"] = _mean_of_rows(chosen(cut["write"], seen[:memory_queries]))
    found["read_strength"] = _mean_of_rows(chosen(cut["read"], seen[memory_queries:]))
    for name, value in _processing(rows, cut["process"], alone).items():
        value = value[..., 1:] if alone else value
        found[name] = value.sum(-1) / max(value.shape[-1], 1)
    return {name: value.clamp(0, 1) for name, value in found.items()}


def _processing(rows: Tensor, process: Tensor, alone: bool) -> dict[str, Tensor]:
    """The measures of what memory tokens do with each other, (layers, heads, memory rows) each."""
    if not rows.shape[-2]:  # a stack in which no memory token is updated
        process = process[..., :0]
    seen = torch.ones(process.shape[-2:], dtype=torch.bool, device=rows.device)
    seen = seen.tril() if alone else seen
    above = excess(process, seen)
    common = _common(above, seen)
    kept, turned, same = copies(rows, above, common)
    return {
        "store": stores(rows, common),
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


def chosen(block: Tensor, seen: Tensor) -> Tensor:
    """How much each row prefers the keys of a block to all that it sees, N keys (`seen`, one number for each row).

        chosen_i = (sum_j A_ij log(N A_ij))_+ / log N        j: the keys of the block

    It is the block's part of the distance (Kullback and Leibler's) between the row and an even one, as a share of the
    largest there is: 1 if all weight is on one key of the block, 0 if the block has no more than in an even row.
    """
    many = seen.to(block.dtype)[:, None].clamp(min=2)  # a row that sees one key has no choice
    found = torch.xlogy(block, block * many).sum(-1).clamp(min=0) / many[:, 0].log()
    return found * (seen > 1)


def _mean_of_rows(found: Tensor) -> Tensor:
    """The mean of what each row has, (layers, heads); 0 where there are no rows."""
    return found.sum(-1) / max(found.shape[-1], 1)


def sharpest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The key with the largest weight in each row, and the margin: how far it is above the second largest."""
    if rows.shape[-1] < 2:
        return torch.zeros(rows.shape[:-1], dtype=torch.long, device=rows.device), torch.zeros_like(rows.sum(-1))
    top = rows.topk(2, dim=-1)
    return top.indices[..., 0], top.values[..., 0] - top.values[..., 1]


def excess(process: Tensor, seen: Tensor) -> Tensor:
    """E_ij = (A_ij - b_i)+, what a memory key has above the background of its row; 0 where the row is even.

    b_i is the mean of those weights among the memory keys that are not above the mean of all of them.
    """
    mean = process.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    low = seen & (process <= mean * (1 + 1e-6))  # with room for rounding: in an even row all weights are the mean
    background = (process * low).sum(-1, keepdim=True) / low.sum(-1, keepdim=True).clamp(min=1)
    return (process - background).clamp(min=0)


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
        the same values  shared(min(F_ij, F_i'j) over j),  F_ij = (E_ij - E_ji - c_j)+: a vertical block

    F is what flows one way only: among tokens that all take from each other there is no source to copy from. A line of
    one key is no copy.
    """
    count = rows.shape[-2]
    key, margin = sharpest(rows)
    pairs = torch.minimum(margin[..., 1:], margin[..., :-1]) * (key < count)[..., 1:] * (key < count)[..., :-1]
    step = key.diff(dim=-1)
    others = key != torch.arange(count, device=rows.device)
    one_way = (above - above.mT - common).clamp(min=0)
    same = shared(torch.minimum(one_way[..., 1:, :], one_way[..., :-1, :]))
    return _of_rows(pairs * (step == 1)) * others, _of_rows(pairs * (step == -1)) * others, _of_rows(same)


def _common(above: Tensor, seen: Tensor) -> Tensor:
    """c_j, what at least three quarters of the rows that see a key give to it: (layers, heads, 1, keys).

    Vertical lines through all rows are no operation: they are what heads look like that are passed by (section A.2).
    Where one row alone sees a key there is nothing in common.
    """
    if not above.shape[-1]:
        return above.new_zeros(*above.shape[:-2], 1, 0)
    hidden = above.masked_fill(~seen, torch.nan)
    found = hidden.nanquantile(0.25, dim=-2, keepdim=True, interpolation="lower")
    return found * (seen.sum(-2) > 1)


def _of_rows(pairs: Tensor) -> Tensor:
    """A number for each pair of neighbouring rows becomes one for each row: the larger of its two pairs'."""
    return torch.maximum(F.pad(pairs, (1, 0)), F.pad(pairs, (0, 1)))
