"""What rows carry from segment to segment: also as one table of all rows, to be divided otherwise when it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class Carry:
    """What goes with the rows of a batch: an XL cache, if the model has one, and the states of its memories by name."""

    cache: Any = None
    states: dict[str, Any] = field(default_factory=dict)

    def _parts(self) -> dict[str, Any]:
        return ({"cache": self.cache} if self.cache is not None else {}) | self.states

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows."""
        for part in self._parts().values():
            part.batch_select_indices(indices)

    def detach(self) -> None:
        """Cuts the graph: no gradient goes back beyond this point through what is carried."""
        for state in self.states.values():
            if hasattr(state, "detach"):  # others keep nothing with a gradient
                state.detach()

    def tensors(self) -> Tensors:
        """All of it, by part and name."""
        return {f"{part}.{name}": t for part, held in self._parts().items() for name, t in held.tensors().items()}

    def load_tensors(self, tensors: Tensors) -> None:
        """The inverse of `tensors`."""
        for part, held in self._parts().items():
            own = part + "."
            held.load_tensors({name.removeprefix(own): t for name, t in tensors.items() if name.startswith(own)})


def join_rows(parts: list[Tensors]) -> Tensors:
    """The tensors of the rows of all parts, one after the other; a single number is the same in each part.

    A part whose rows hold less than those of another is filled up with zeros; how much rows hold, they say themselves.
    """
    first = parts[0] if parts else {}
    return {name: _joined([part[name] for part in parts]) if first[name].ndim else first[name] for name in first}


def _joined(tensors: list[Tensor]) -> Tensor:
    most = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    filled = []
    for tensor in tensors:
        missing = [most[axis] - tensor.shape[1 + axis] for axis in range(len(most))]
        filled.append(F.pad(tensor, [side for amount in reversed(missing) for side in (0, amount)]))
    return torch.cat(filled)


def take_rows(tensors: Tensors, first: int, count: int) -> Tensors:
    """The part of `count` rows that begins at row `first`."""
    return {name: tensor[first : first + count] if tensor.ndim else tensor for name, tensor in tensors.items()}
