"""What rows carry from segment to segment, as one table of all rows, which can be divided otherwise when it is read."""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def join_rows(parts: list[Tensors]) -> Tensors:
    """The tensors of the rows of all parts, one after the other; a single number is the same in each part."""
    first = parts[0] if parts else {}
    return {name: torch.cat([part[name] for part in parts]) if first[name].ndim else first[name] for name in first}


def take_rows(tensors: Tensors, first: int, count: int) -> Tensors:
    """The part of `count` rows that begins at row `first`."""
    return {name: tensor[first : first + count] if tensor.ndim else tensor for name, tensor in tensors.items()}
