"""What a head does with memory tokens, found in its attention weights: write, store, fusion, copy, read.

The operations are those that section 3.2 of arXiv 2006.11527 finds by eye. A row of weights A_i belongs to what is
updated, a column to what it takes from; with m memory tokens first in rows and columns, A has four blocks (Figure 3):

    process  memory rows, memory keys        write   memory rows, sequence keys
    read     sequence rows, memory keys      update  sequence rows, sequence keys

Every measure is a number from 0 to 1 for each layer and head: a mean over rows, so that the parts of a memory that are
used in different ways add up. Attention that is even is none of the operations.
"""

from __future__ import annotations

import math

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


def measures(weights: Tensor, memory_queries: int, memory_keys: int, causal: bool = False) -> dict[str, Tensor]:
    """Every measure of this file, by name, (layers, heads) each; 0 for what a stack cannot do.

    The first memory token of a causal stack sees itself alone. It has no choice, so it has no part in the means.
    """
    rows = weights[..., :memory_queries, :].double()
    cut = blocks(weights, memory_queries, memory_keys)
    cut = {name: cut[name].double() for name in ("write", "process", "read")}  # the largest block is not measured
    found = {}
    found["write"], found["write_focus"] = mass_and_focus(cut["write"])
    found["process"] = cut["process"].sum(-1).sum(-1) / max(memory_queries, 1)
    found["read"], found["read_focus"] = mass_and_focus(cut["read"])
    for name, value in _processing(rows, cut["process"], causal).items():
        value = value[..., 1:] if causal else value
        found[name] = value.sum(-1) / max(value.shape[-1], 1)
    return {name: value.clamp(0, 1) for name, value in found.items()}


def _processing(rows: Tensor, process: Tensor, causal: bool) -> dict[str, Tensor]:
    """The measures of what memory tokens do with each other, (layers, heads, memory rows) each."""
    if not rows.shape[-2]:  # a stack in which no memory token is updated
        process = process[..., :0]
    seen = torch.ones(process.shape[-2:], dtype=torch.bool, device=rows.device)
    seen = seen.tril() if causal else seen
    above = excess(process, seen)
    kept, turned, same = copies(rows, above, seen)
    return {
        "store": stores(rows),
        "fusion": fusions(above),
        "copy": torch.maximum(torch.maximum(kept, turned), same),
        "copy_kept": kept,
        "copy_reversed": turned,
        "copy_same": same,
    }


def strengths(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """How much there is of each operation, comparable with each other: of write and read, mass times focus."""
    return {name: found[name] * found.get(f"{name}_focus", 1) for name in OPERATIONS}


def strongest(found: dict[str, float]) -> str:
    """The name of the operation there is most of; "none" if none is clear."""
    name = max(found, key=lambda operation: found[operation])
    return name if found[name] >= CLEAR else NONE


def mass_and_focus(block: Tensor) -> tuple[Tensor, Tensor]:
    """How much weight the rows of a block have in it, and on how few of its K keys that weight is.

        mass = mean_i M_i            M_i = sum_j A_ij
        focus = sum_i M_i (1 - H_i / log K) / sum_i M_i       H_i: the entropy of A_ij / M_i over j

    Focus is 1 if each row has one key, 0 if it weighs all keys alike or there is only one to choose.
    """
    if not block.shape[-2]:
        return block.sum(-1).sum(-1), block.sum(-1).sum(-1)
    mass = block.sum(-1)
    shares = block / mass.clamp(min=_TINY).unsqueeze(-1)
    entropy = -torch.xlogy(shares, shares).sum(-1)
    focus = 1 - entropy / math.log(block.shape[-1]) if block.shape[-1] > 1 else torch.zeros_like(mass)
    return mass.mean(-1), (mass * focus).sum(-1) / mass.sum(-1).clamp(min=_TINY)


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


def stores(rows: Tensor) -> Tensor:
    """store_i = A_ii - max_{j != i} A_ij, or 0: a sharp diagonal, by which a memory token is added to itself."""
    key, margin = sharpest(rows)
    return margin * (key == torch.arange(rows.shape[-2], device=rows.device))


def fusions(above: Tensor) -> Tensor:
    """fusion_i = shared(E_ij, |i - j| <= 1): a soft diagonal, by which neighbouring memory tokens are summed."""
    places = torch.arange(above.shape[-1], device=above.device)
    near = (places[:, None] - places).abs() <= 1
    return shared(above * near)


def copies(rows: Tensor, above: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How much each memory row copies from other memory tokens as the row before or after it does, in three ways.

    With t_i the key of a row's largest weight and s_i its margin, for the rows i and i' = i + 1:

        order kept       min(s_i, s_i')   if t_i' = t_i + 1 and t_i != i: a shifted diagonal
        order reversed   min(s_i, s_i')   if t_i' = t_i - 1 and t_i != i: an antidiagonal
        the same values  shared(min(F_ij, F_i'j) over j),  F_ij = (E_ij - E_ji - c_j)+: a vertical block

    F is what flows one way only: among tokens that all take from each other there is no source to copy from. c_j is
    what at least three quarters of the rows that see a key give to it. Vertical lines through all rows are no copy, nor
    is a line of one key; they are what heads look like that are passed by (section A.2).
    """
    count = rows.shape[-2]
    key, margin = sharpest(rows)
    pairs = torch.minimum(margin[..., 1:], margin[..., :-1]) * (key < count)[..., 1:] * (key < count)[..., :-1]
    step = key.diff(dim=-1)
    others = key != torch.arange(count, device=rows.device)
    one_way = (above - above.mT - _common(above, seen)).clamp(min=0)
    same = shared(torch.minimum(one_way[..., 1:, :], one_way[..., :-1, :]))
    return _of_rows(pairs * (step == 1)) * others, _of_rows(pairs * (step == -1)) * others, _of_rows(same)


def _common(above: Tensor, seen: Tensor) -> Tensor:
    """What at least three quarters of the rows that see a key give to it, for each key: (layers, heads, 1, keys)."""
    if not above.shape[-1]:
        return above
    hidden = above.masked_fill(~seen, torch.nan)
    return hidden.nanquantile(0.25, dim=-2, keepdim=True, interpolation="lower")


def _of_rows(pairs: Tensor) -> Tensor:
    """A number for each pair of neighbouring rows becomes one for each row: the larger of its two pairs'."""
    return torch.maximum(F.pad(pairs, (1, 0)), F.pad(pairs, (0, 1)))
