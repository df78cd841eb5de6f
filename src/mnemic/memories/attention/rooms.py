"""The memories of rows before they hold anything: how much room they take, and how they are searched."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from mnemic.errors import UsageError
from mnemic.memories.attention.config import KNNAttention
from mnemic.memories.attention.search import ExactKeys, Keys, ListedKeys, new_ring
from mnemic.memories.attention.state import State
from mnemic.memories.attention.working import Row, WorkingMemory

EXACT = 8192  # pairs up to which all are compared, unless the settings say otherwise: lists of few take much room


@dataclass(frozen=True)
class Rooms:
    """What memories of a model are made from."""

    config: KNNAttention
    shapes: dict[int, tuple[int, int]]  # key/value heads of each layer with a memory, and their width
    spare: int  # pairs that a row keeps beyond its size: what the context may hold
    device: torch.device

    def bytes(self, rows: int, size: int) -> int:
        """What so many rows of `size` pairs take at most."""
        width = 2 if self.config.dtype == "float16" else 4
        return sum(2 * rows * (size + self.spare) * heads * each * width for heads, each in self.shapes.values())

    def state(self, rows: int, size: int) -> State:
        """Empty memories of `size` pairs for so many rows; UsageError if there is no room for them."""
        self._check_room(rows, size)
        return State({index: WorkingMemory([self._row(index, size) for _ in range(rows)]) for index in self.shapes})

    def _check_room(self, rows: int, size: int) -> None:
        needed, free = self.bytes(rows, size), psutil.virtual_memory().available
        if self.device.type == "cpu" and needed > free:
            raise UsageError(
                f"an attention memory of {size:,} pairs in {len(self.shapes)} layers for {rows} rows takes "
                f"{needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: lower size, dtype or the batch size"
            )

    def _row(self, index: int, size: int) -> Row:
        (heads, width), dtype = self.shapes[index], getattr(torch, self.config.dtype)
        values = new_ring(heads, size + self.spare, width, dtype, self.device)
        return Row(size, values, self._keys(heads, width, size, dtype))

    def _keys(self, heads: int, width: int, size: int, dtype: torch.dtype) -> Keys:
        config = self.config
        listed = config.search == "lists"
        if config.search == "auto":
            listed = self.device.type == "cpu" and size > EXACT
        if listed and self.device.type != "cpu":
            raise UsageError(
                "KNNAttention.search = 'lists' is for CPUs: set it to exact or auto, which compare all pairs"
            )
        if listed and not config.dense:
            return ListedKeys(size, config.k, config.recall, heads, width, dtype)
        return ExactKeys(heads, width, size + self.spare, dtype, self.device)

    def check(self, tensors: dict[str, Tensor]) -> None:
        """UsageError if these tensors of a state are not of such memories."""
        layers = sorted(self.shapes)
        found = {name: tuple(t.shape) for name, t in tensors.items() if name.endswith((".keys", ".values"))}
        for index, (heads, width) in self.shapes.items():
            for name in (f"{index}.keys", f"{index}.values"):
                if found.pop(name, ())[1::2] != (heads, width):
                    raise UsageError(
                        f"what was read has no {name} of {heads} heads of {width}, which this memory in layers "
                        f"{layers} needs: read the text again"
                    )
        if found:
            raise UsageError(
                f"what was read has {', '.join(found)} and the memory is in layers {layers}: read it again"
            )
