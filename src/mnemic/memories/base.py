"""The contract of a memory: what `augment` asks of each folder in `memories/`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mnemic.errors import UsageError
from mnemic.memories.config import MemoryConfig

if TYPE_CHECKING:
    from mnemic.hf.anatomy import Places
    from mnemic.hf.entrance import Entrance


Masses = Callable[..., tuple[torch.Tensor, torch.Tensor, Any]]
"""For inputs by name: the losses of the targets, the logarithms of the softmax's normalisers, and the outputs."""


@dataclass(frozen=True)
class Reading:
    """A batch of text whose next tokens are scored: the forward's inputs by name, and what it does not take."""

    inputs: dict[str, Any]
    targets: torch.Tensor  # (B, T), -100 where nothing is scored
    document_starts: torch.Tensor | None = None
    streams: torch.Tensor | None = None  # (B,): rows of equal numbers are consecutive segments of one text
    state: Any = None  # from `new_state`


_weights_follow: ContextVar[bool] = ContextVar("mnemic_weights_follow", default=False)
weights_follow = _weights_follow.get
"""Whether memories are put into a model to be filled from a file at once: large ones need not begin with numbers."""


@contextlib.contextmanager
def to_be_filled() -> Iterator[None]:
    """Within this context memories may be put into models on the meta device, for their weights follow."""
    token = _weights_follow.set(True)
    try:
        yield
    finally:
        _weights_follow.reset(token)


class Handle(nn.Module):
    """One memory in one model: its parameters, its run-time state, and the way back.

    `attach.py` of each memory defines a subclass named `Attached` and is found by it. Its parameters are the memory's
    parameters; everything it changes in the model it puts back in `detach`, and it is without effect while `switch`ed
    off.
    """

    changes_keys: ClassVar[bool] = True  # whether the hidden states of the model depend on the memory

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def attach(cls, config: MemoryConfig, places: Places, entrance: Entrance) -> Handle:
        """Puts the memory into a model."""
        raise NotImplementedError(f"{cls.__name__} does not say how to attach")

    def check_beside(self, others: Mapping[str, Handle]) -> None:
        """UsageError if it cannot be in one model with these, which may come before it or after it."""

    def switch(self, on: bool) -> None:
        """Makes the memory take part, or leaves the model exactly as its base."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to switch")

    def detach(self) -> None:
        """Takes the memory out of the model."""
        self.switch(False)

    def outputs(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The model's forward for these inputs; a memory at the model's output changes what comes out of it."""
        return forward(**inputs)

    def run(self, forward: Callable[..., Any], inputs: dict[str, Any], reading: Reading) -> Any:
        """What `forward` gives for these inputs when their targets are scored; a memory inside the model follows it."""
        return forward(**inputs)

    def token_losses(self, masses: Masses, reading: Reading) -> tuple[torch.Tensor, Any]:
        """The loss of each target, (B, T), and the outputs, without forming all logits."""
        losses, _, outputs = masses(**reading.inputs)
        return losses, outputs

    @property
    def segment(self) -> int | None:
        """How many tokens of a text it was made to read at a time; None: as many as the model has room for."""
        return None

    @property
    def writes(self) -> bool:
        """Whether it writes behind each segment what the next one reads."""
        return False

    def new_state(self, rows: int) -> Any:
        """What goes from segment to segment in each row of a batch, empty; None where nothing does.

        It has `batch_select_indices`, `tensors` and `load_tensors`; one through which gradients go back, `detach`.
        """
        return None

    def state_bytes(self, rows: int) -> int:
        """What the state of so many rows takes at most."""
        return 0

    def check_training(self, config: Any, kind: str) -> None:
        """Refuses settings of training (TrainConfig) that this memory cannot be trained with.

        kind: of the model, "causal", "masked", "seq2seq", "classification" or "spans".
        """

    def begin_step(self, step: int, steps: int) -> None:
        """Tells how far training is, before each step."""

    def tell(self) -> tuple[dict[str, float], list[str]]:
        """What training has shown since it was last asked: figures for the log, and sentences for the user."""
        return {}, []

    def end_training(self) -> None:
        """Lets go of what was kept for `tell`."""

    def unused(self) -> list[nn.Parameter]:
        """The parameters of the model that take no part while the memory does."""
        return []

    @property
    def connected(self) -> bool:
        """Whether the memory has the store that its config names."""
        return True

    def connect(self, store: Any) -> None:
        """Gives the memory the store that its config names."""

    def change(self, **settings: Any) -> None:
        """Changes settings and keeps what was learned; UsageError for those that it depends on."""
        raise UsageError(f"the {self.config.memory()} memory has learned with its settings: detach() it to change them")

    @property
    def reads(self) -> bool:
        """Whether it keeps what `model.memory.read` reads."""
        return False

    def taking_in(self, texts: int, real: torch.Tensor | None) -> AbstractContextManager[None]:
        """Within this context, in which the stack reads on in so many texts, keeps it for every later forward.

        real: (texts, T), 0 on padding.
        """
        return contextlib.nullcontext()

    def reset(self) -> None:
        """Forgets what was read so far."""

    def state(self) -> dict[str, torch.Tensor]:
        """What was read so far, as tensors to be saved; empty where there is nothing."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
