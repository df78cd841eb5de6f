"""The label of a whole text from its memory, in place of the model's own head (arXiv 2006.11527, Table 5, "+pool")."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from mnemic.errors import UnsupportedModel
from mnemic.hf.anatomy import Places
from mnemic.hf.losses import text_loss
from mnemic.memories.tokens.layer import PooledHead

_kept: ContextVar[list[torch.Tensor] | None] = ContextVar("mnemic_pooled_memory", default=None)


def new_head(places: Places) -> PooledHead:
    """A head for the labels of a model, with the dropout of its own and drawn as the model draws its linear layers."""
    stack: Any = places.stack
    if places.anatomy.kind != "masked":
        raise UnsupportedModel(
            f"MemoryTokens.pool = True labels a text by a memory that has read it, and {type(stack).__name__} is of a "
            f"{places.anatomy.kind} model, not an encoder: give one such as BERT, or leave pool = False"
        )
    if places.text_head is None:
        raise UnsupportedModel(
            f"MemoryTokens.pool = True labels whole texts, and there is no head for that on {type(stack).__name__}: "
            "load the model with AutoModelForSequenceClassification or mnemic.with_head, or leave pool = False"
        )
    parts = [part for module in places.text_head for part in module.modules()]
    dropout = [part.p for part in parts if isinstance(part, nn.Dropout)][-1:] or [0.0]
    head = PooledHead(stack.config.hidden_size, stack.config.num_labels, *dropout)
    stack._init_weights(head.classifier)
    return head.to(next(stack.parameters()).device)


def keep(states: torch.Tensor) -> None:
    """Takes the outputs for the memory, (B, m, d), for the `labelled` that is under way."""
    if (kept := _kept.get()) is not None:
        kept.append(states)


def labelled(head: PooledHead, config: Any, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """The outputs of a model's forward, with logits and loss from the memory."""
    labels, asked = inputs.get("labels"), inputs.get("return_dict")
    kept: list[torch.Tensor] = []
    token = _kept.set(kept)
    try:
        outputs = forward(**inputs | {"labels": None, "return_dict": True})
    finally:
        _kept.reset(token)
    logits = head(kept[-1])
    loss = None if labels is None else text_loss(config, logits, labels)
    outputs = dataclasses.replace(outputs, logits=logits, loss=loss)
    return outputs if (config.return_dict if asked is None else asked) else outputs.to_tuple()
