"""What an attention memory keeps of the texts of a batch: a working memory for each of its layers."""

from __future__ import annotations

from torch import Tensor

from mnemic.memories.attention.search import ListedKeys
from mnemic.memories.attention.working import WorkingMemory


class State:
    """The working memories by layer; goes from segment to segment, or rides in an XL cache."""

    def __init__(self, memories: dict[int, WorkingMemory]) -> None:
        self.memories = memories

    def batch_select_indices(self, indices: Tensor) -> None:
        """Makes the rows these."""
        for memory in self.memories.values():
            memory.select(indices.tolist())

    reorder_cache = batch_select_indices

    def forget(self, rows: Tensor) -> None:
        """Empties the memories of these rows."""
        for memory in self.memories.values():
            for row in rows.tolist():
                memory.rows[row].clear()

    def recall(self, k: int) -> float | None:
        """The share of the true nearest k that the last searches found; None where all pairs are compared."""
        rows = [row.keys for memory in self.memories.values() for row in memory.rows]
        found = [share for keys in rows if isinstance(keys, ListedKeys) and (share := keys.recall(k)) is not None]
        return sum(found) / len(found) if found else None

    def tensors(self) -> dict[str, Tensor]:
        """All that it holds, a row for each row of the batch."""
        return {f"{layer}.{name}": t for layer, memory in self.memories.items() for name, t in memory.tensors().items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Goes on from where `tensors` were taken."""
        for layer, memory in self.memories.items():
            own = f"{layer}."
            memory.load_tensors({name.removeprefix(own): t for name, t in tensors.items() if name.startswith(own)})
