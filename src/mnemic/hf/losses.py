"""The loss of each token, for any model: the one quantity that training and evaluation share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForSequenceClassificationLoss

IGNORED = -100


def token_losses(model: Any, targets: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, Any]:
    """The negative log likelihood of `targets[b, t]` given the inputs up to `t` (0 where ignored), and the outputs.

    A model that need not form all logits (adaptive softmax) answers through a `token_losses` method of its own.
    """
    if hasattr(model, "token_losses"):
        return model.token_losses(targets=targets, **inputs)
    losses, _, outputs = masses_of_logits(model, targets, **inputs)
    return losses, outputs


def masked_token_losses(model: Any, targets: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The negative log likelihood of `targets` (0 where ignored) for a masked model, whose head sees only their places.

    Few tokens are hidden, and over a whole vocabulary logits are most of what a small model computes.
    """
    scored = targets != IGNORED

    def only_scored(_: Any, __: Any, output: Any) -> Any:
        states = output[0][scored].unsqueeze(0)
        if isinstance(output, tuple):
            return (states, *output[1:])
        output["last_hidden_state"] = states
        return output

    hook = model.base_model.register_forward_hook(only_scored)
    try:
        logits = model(**inputs).logits[0]
    finally:
        hook.remove()
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    losses = F.cross_entropy(logits, targets[scored], reduction="none")
    return torch.zeros(targets.shape, dtype=losses.dtype, device=losses.device).masked_scatter(scored, losses)


def masses_of_logits(
    forward: Callable[..., Any], targets: torch.Tensor, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The losses of the targets, the logarithms of the softmax's normalisers, and the outputs of a forward."""
    outputs = forward(**inputs)
    logits = outputs.logits
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    losses = losses.view_as(targets)
    wanted = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return losses, losses + wanted, outputs


def text_loss(config: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of logits (B, labels) that a model of transformers with this config would give for whole texts."""
    loss: torch.Tensor = ForSequenceClassificationLoss(labels, logits, config)
    return loss
