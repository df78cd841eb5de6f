"""A fingerprint of a model's weights: the same numbers give the same one, in any process."""

from __future__ import annotations

import torch
import xxhash
from torch import nn

MEMORY = "memory."


def fingerprint(model: nn.Module) -> str:
    """xxh3-128 over names, types, shapes and bytes of all weights but the memory's own."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(MEMORY):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
