"""The loss of each token, for any model: the one quantity that training and evaluation share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100


def token_losses(model: Any, targets: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, Any]:
    """The negative log likelihood of `targets[b, t]` given the inputs up to `t` (0 where ignored), and the outputs.

    A model that need not form all logits (adaptive softmax) answers through a `token_losses` method of its own.
    """
    if hasattr(model, "token_losses"):
        return model.token_losses(targets=targets, **inputs)
    outputs = model(**inputs)
    logits = outputs.logits.flatten(0, 1)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets), outputs
