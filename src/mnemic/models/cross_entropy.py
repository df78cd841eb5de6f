"""The loss of each token from its logits, without the copies that the usual cross entropy makes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
ROWS = 512  # rows of logits worked on at a time: a few megabytes, so that temporary copies stay small


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] for logits (N, V) and targets (N,); 0 where the target is -100. In float32.

    Only the logits themselves are kept for the backward pass, which needs one more array of their size.
    """
    return normalised_cross_entropy(logits, targets)[0]


def normalised_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the logarithm of the softmax's normaliser, (N,) each."""
    return _TokenCrossEntropy.apply(logits, targets)


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(logits.dtype, torch.float32)
        kept = targets != IGNORED
        chosen = targets.where(kept, 0).unsqueeze(1)
        losses = torch.empty(targets.shape, dtype=precise, device=logits.device)
        for piece, index, out in zip(logits.split(ROWS), chosen.split(ROWS), losses.split(ROWS), strict=True):
            out.copy_(-F.log_softmax(piece, dim=1, dtype=precise).gather(1, index).squeeze(1))
        normaliser = losses + logits.gather(1, chosen).squeeze(1)  # log of the sum of exponentials
        ctx.save_for_backward(logits, normaliser, chosen, kept)
        return losses * kept, normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, normaliser, chosen, kept = ctx.saved_tensors
        to_target = (gradients[0] * kept).unsqueeze(1)
        to_all = to_target + gradients[1].unsqueeze(1)
        result = torch.empty_like(logits)
        normaliser = normaliser.unsqueeze(1)
        for start in range(0, logits.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            probabilities = (logits[rows] - normaliser[rows]).exp_()
            probabilities *= to_all[rows]
            result[rows] = probabilities.scatter_add_(1, chosen[rows], -to_target[rows].to(probabilities.dtype))
        return result, None


def mean_loss(losses: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """The mean over targets, or over the number of them that the trainer counted in all accumulated batches."""
    if num_items_in_batch is None:
        return losses.sum() / (targets != IGNORED).sum()
    return losses.sum() / num_items_in_batch
