"""Attention with a learned bias on a CPU: torch's fast kernel forward, and a backward that gives the bias a gradient.

torch's own function turns to a slow way as soon as the mask needs a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128  # queries worked on at a time in the backward pass


def biased_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """softmax(scaling q k + bias) v for (B, heads, T or K, width) and a bias (B or 1, heads or 1, T, K)."""
    return _BiasedAttention.apply(query, key, value, bias, scaling)


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias, scale=scaling
        )
        ctx.save_for_backward(query, key, value, bias, output)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, bias, output = ctx.saved_tensors
        above = gradients[0]
        # The sum over keys of weight x its gradient is the same as output x its gradient, summed over the width.
        mean = (above * output).sum(-1, keepdim=True)
        to_query, to_key, to_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        to_bias = torch.zeros_like(bias)
        blocks = _blocks(bias)
        for row in range(query.shape[0]):  # one row at a time: the (heads, T, K) arrays stay in the processor's cache
            own = row if bias.shape[0] > 1 else 0
            for queries, keys in blocks:
                asked, known, read, wanted = (
                    query[row, :, queries],
                    key[row, :, keys],
                    value[row, :, keys],
                    above[row, :, queries],
                )
                scores = torch.baddbmm(bias[own, :, queries, keys], asked, known.transpose(1, 2), alpha=ctx.scaling)
                weights = scores.softmax(-1)  # much faster than exp(scores - normaliser), which is slow where masked
                to_value[row, :, keys] += torch.bmm(weights.transpose(1, 2), wanted)
                slope = torch.bmm(wanted, read.transpose(1, 2)).sub_(mean[row, :, queries]).mul_(weights)
                to_bias[own, :, queries, keys] += slope if bias.shape[1] > 1 else slope.sum(0, keepdim=True)
                to_query[row, :, queries] = torch.bmm(slope, known).mul_(ctx.scaling)
                to_key[row, :, keys] += torch.bmm(slope.transpose(1, 2), asked).mul_(ctx.scaling)
        return to_query, to_key, to_value, to_bias, None


def _blocks(bias: Tensor) -> list[tuple[slice, slice]]:
    """Queries in blocks, each with the keys up to the last one that any of them sees: the others weigh nothing."""
    queries, keys = bias.shape[2:]
    hidden = torch.finfo(bias.dtype).min / 2
    highest = bias.amax(1)
    if (highest.amax(-1) <= hidden).any():  # a query that sees nothing (padding) weighs all keys alike
        return [(slice(0, queries), slice(0, keys))]
    last = ((highest.amax(0) > hidden) * torch.arange(1, keys + 1, device=bias.device)).amax(-1)
    return [
        (slice(first, min(first + BLOCK, queries)), slice(0, int(last[first : first + BLOCK].max())))
        for first in range(0, queries, BLOCK)
    ]
