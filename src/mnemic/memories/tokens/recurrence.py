"""What recurrent memory tokens carry from segment to segment of a document, in each row of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from mnemic.errors import UsageError


class Carried:
    """What the memory of each row has written so far; rows begin anew where a document starts.

    What was written keeps its gradient until `detach`: training goes back through the segments of one step.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self.written = torch.zeros(rows, *like.shape, dtype=like.dtype, device=like.device)
        self.begun = torch.zeros(rows, dtype=torch.bool, device=like.device)  # which rows have read anything

    def __len__(self) -> int:
        return len(self.begun)

    def write(self, written: Tensor, read: Tensor | None = None, ended: Tensor | None = None) -> None:
        """Takes what was written behind a segment, (B, m, d).

        Rows that did not `read` a token of it, (B,), stay as they are; those whose document has `ended` begin anew.
        """
        written, begun = written.to(self.written), torch.ones_like(self.begun)
        if read is not None:
            written = torch.where(read[:, None, None], written, self.written)
            begun = self.begun | read
        self.written, self.begun = written, begun if ended is None else begun & ~ended

    def detach(self) -> None:
        """Cuts the graph: no gradient goes back beyond this point."""
        self.written = self.written.detach()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Makes the rows these."""
        self.written, self.begun = self.written[indices], self.begun[indices]

    def shared_by(self, batch: int) -> Carried:
        """The same for a batch in which each row serves equally many, one after the other."""
        if batch % len(self):
            raise UsageError(
                f"the memory tokens have read {len(self)} texts and the batch has {batch} rows: read one text for all "
                "rows, or one for each"
            )
        twin = Carried(0, self.written[0])
        twin.written, twin.begun = (
            part.repeat_interleave(batch // len(self), 0) for part in (self.written, self.begun)
        )
        return twin

    def tensors(self) -> dict[str, Tensor]:
        """All that is carried, a row for each row of the batch."""
        return {"written": self.written.detach().clone(), "begun": self.begun.clone()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        if tensors["written"].shape[1:] != self.written.shape[1:]:
            raise UsageError(
                f"this was written by memory tokens of another number or width, {tuple(tensors['written'].shape[1:])} "
                f"where these have {tuple(self.written.shape[1:])}: read the text again"
            )
        self.written, self.begun = tensors["written"].to(self.written), tensors["begun"].to(self.begun)
