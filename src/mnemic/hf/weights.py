"""The attention weights of every layer and head of a model, for one forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mnemic.errors import UnsupportedModel

OUTPUTS = {
    "attentions": "self",
    "encoder_attentions": "encoder",
    "decoder_attentions": "decoder",
    "cross_attentions": "cross",
}
"""What transformers calls the weights of a stack, and what they are called here."""


def attention_weights(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """The weights that a model attends with, by stack, for a batch of one: (layers, heads, queries, keys) each.

    A prefix is among queries and keys, at their beginning. Weights of layers with an attention memory are those of
    their own attention.
    """
    with writing_out(model):
        outputs = model(**inputs, output_attentions=True, use_cache=False, return_dict=True)
    found = {stack: outputs.get(name) for name, stack in OUTPUTS.items()}
    found = {stack: layers for stack, layers in found.items() if layers}  # GPT-2 has an empty tuple where others None
    if not found or any(layer is None for layers in found.values() for layer in layers):
        raise UnsupportedModel(
            f"{type(model).__name__} does not show its attention weights: use an architecture that returns them with "
            "output_attentions=True, such as BERT, GPT-2, Llama, T5, or our decoder"
        )
    return {stack: torch.cat([_readable(layer) for layer in layers]) for stack, layers in found.items()}


@contextlib.contextmanager
def writing_out(model: Any) -> Iterator[None]:
    """Within this context attention is computed by the implementation that has its weights to show: "eager"."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    configs: dict[int, Any] = {id(part.config): part.config for part in parts}  # encoder and decoder may have their own
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _readable(weights: Tensor) -> Tensor:
    """Narrow numbers as float32: sums over a row are then as near to 1 as they can be."""
    return weights.detach().to(torch.promote_types(weights.dtype, torch.float32)).cpu()
