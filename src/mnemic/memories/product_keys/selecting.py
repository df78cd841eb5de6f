"""The best pairs of sub-keys, found on a CPU in a quarter of the time that `torch.topk` takes.

NumPy parts the largest numbers of a row from the others with vector instructions, but forgets where they were. So the
last bits of each score are replaced by its place in the row before: the largest then tell where they come from. A few
more than k are taken, looked up as they were, and put in order. They hold the k best for certain if the k-th of them
and the last differ in other than these bits, and if none is so small that a processor may take it for 0, place and
all; if not, or where this does not apply, `layer.best_pairs` is asked.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mnemic.memories.product_keys.layer import best_pairs, useful_pairs

SPARE = 4  # numbers that are taken besides the k
SHARE = 4  # numbers in a row for each that is wanted, at least: with fewer there is nothing to gain
EXPONENT = np.int32(0x7F800000)  # the bits of a float32 that are 0 in the smallest numbers
AT_ONCE = 1024  # queries that a thread takes at a time


@torch.no_grad()
def quick_best_pairs(scores: Tensor, k: int) -> Tensor:
    """As `layer.best_pairs`, in any order: scores (heads, 2, N, C) to pairs (heads, 2, N, k)."""
    heads, _, tokens, codebook = scores.shape
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or (k + SPARE) * SHARE > codebook or not tokens:
        return best_pairs(scores, k)
    if torch.compiler.is_compiling():  # which takes NumPy for torch, and torch has no partition
        return best_pairs(scores, k)
    pairs = torch.empty(heads, 2, tokens, k, dtype=torch.int64)
    numbers, found = scores.numpy(), pairs.numpy()
    ranks = [rank.numpy() for rank in useful_pairs(k, k, scores.device)]

    threads = torch.get_num_threads()
    together = max(min(AT_ONCE // tokens, -(-heads // threads)), 1)  # heads
    parts = [
        (slice(head, head + together), slice(None), slice(begin, begin + AT_ONCE))
        for head in range(0, heads, together)
        for begin in range(0, tokens, AT_ONCE)
    ]
    left = iter(parts)

    def find() -> None:
        for part in left:
            if not _best_pairs(numbers[part], k, ranks, found[part]):
                found[part] = best_pairs(scores[part], k).numpy()  # a helper may not write to `pairs` in inference mode

    helpers = [_threads().submit(find) for _ in range(min(threads, len(parts)) - 1)]
    find()
    for helper in helpers:
        helper.result()
    return pairs


def _best_pairs(scores: np.ndarray, k: int, ranks: list[np.ndarray], found: np.ndarray) -> bool:
    """Puts the best pairs into `found`; whether they are known for certain."""
    heads, _, tokens, codebook = scores.shape
    values, places, certain = _largest(scores.reshape(-1, codebook), k)
    if not certain:
        return False
    values, places = (part.reshape(heads, 2, tokens, k) for part in (values, places))
    sums = values[:, 0].take(ranks[0], 2) + values[:, 1].take(ranks[1], 2)
    best = np.flatnonzero(sums >= np.partition(sums, -k, axis=2)[..., -k, None])
    if best.size != found[:, 0].size:
        return False
    begins = np.arange(heads * tokens).reshape(heads, tokens, 1)
    best = best.reshape(heads, tokens, k) - sums.shape[2] * begins
    if best[..., 0].min() < 0 or best[..., -1].max() >= sums.shape[2]:  # more than k of a token, whose sums are equal
        return False
    for half, rank in enumerate(ranks):
        found[:, half] = places[:, half].reshape(-1)[rank[best] + k * begins]
    return True


def _largest(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """The k largest numbers of each row, the largest first; their places; whether these are certainly they."""
    width, count = rows.shape[1], k + SPARE
    last = np.int32((1 << (width - 1).bit_length()) - 1)
    marked = rows.view(np.int32) & ~last
    marked |= np.arange(width, dtype=np.int32)
    marked.view(np.float32).partition(width - count, axis=1)
    marked = marked[:, width - count :]
    places = marked & last
    begins = np.arange(len(rows))[:, None]
    values = rows.reshape(-1).take(places + width * begins)
    order = values.argsort(axis=1)[:, ::-1] + count * begins
    values = values.reshape(-1)[order]
    kth, final = ((values[:, rank].view(np.int32) & ~last).view(np.float32) for rank in (k - 1, count - 1))
    certain = bool((kth > final).all() and np.isfinite(values).all() and (marked & EXPONENT).all())
    return values[:, :k], places.reshape(-1)[order[:, :k]], certain


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="mnemic-product-keys")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not follow into a forked process
