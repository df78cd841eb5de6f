"""The best slots of a product key, found on a CPU in less than half the time that `torch.topk` takes.

NumPy finds the k-th largest number of a row with vector instructions (np.partition), and the numbers from there on are
the k largest: `layer.best_slots` does the same, and does it wherever this does not apply.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mnemic.memories.product_keys.layer import best_slots, useful_pairs

SHARE = 4  # numbers in a row for each that is wanted, at least: with fewer there is nothing to gain
AT_ONCE = 512  # rows that one thread takes at a time


@torch.no_grad()
def quick_best_slots(scores: Tensor, k: int) -> Tensor:
    """As `layer.best_slots`: scores (heads, 2, N, C) to slots (heads, N, k), in any order."""
    heads, _, tokens, codebook = scores.shape
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or k * SHARE > codebook or not tokens:
        return best_slots(scores, k)
    rows = scores.reshape(-1, codebook)
    if (found := largest(rows, k)) is None:
        return best_slots(scores, k)
    values = rows.view(-1)[found]
    order = torch.from_numpy(np.argsort(values.numpy(), axis=-1)).flip(-1)
    values, found = (part.gather(1, order).view(heads, 2, tokens, k) for part in (values, found % codebook))
    first, second = useful_pairs(k, k, scores.device)
    sums = values[:, 0].index_select(2, first) + values[:, 1].index_select(2, second)
    if (best := largest(sums.view(heads * tokens, -1), k)) is None:
        return best_slots(scores, k)
    best = best.view(heads, tokens, k) % len(first)
    return found[:, 0].gather(2, first[best]) * codebook + found[:, 1].gather(2, second[best])


def largest(rows: Tensor, k: int) -> Tensor | None:
    """Where, in the flat tensor, the k largest numbers of each row are, (rows, k); None where numbers are equal."""
    least, numbers = np.empty(len(rows), np.float32), rows.numpy()

    def find(begin: int) -> None:
        some = slice(begin, begin + AT_ONCE)
        least[some] = np.partition(numbers[some], -k, axis=-1)[:, -k]

    list(_threads(torch.get_num_threads()).map(find, range(0, len(rows), AT_ONCE)))
    found = (rows >= torch.from_numpy(least).unsqueeze(1)).view(-1).nonzero().squeeze(1)
    return found.view(len(rows), k) if len(found) == k * len(rows) else None


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="mnemic-product-keys")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not follow into a forked process
