"""Memory tokens go before the input of the model's stack; of a sequence-to-sequence model encoder, decoder or both."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import Places
from mnemic.hf.entrance import Entrance
from mnemic.hf.positions import separates_documents
from mnemic.hf.prefix import Prefix, Vectors
from mnemic.memories.base import Handle, Reading
from mnemic.memories.texts import READ_ON
from mnemic.memories.tokens.blocks import BottleneckBlock, ControlledBlock
from mnemic.memories.tokens.config import BOTTLENECKS, MemoryTokens
from mnemic.memories.tokens.layer import MemoryController, MemoryTokenLayer, PooledHead
from mnemic.memories.tokens.pooling import keep, labelled, new_head
from mnemic.memories.tokens.recurrence import Carried
from mnemic.memories.within import Within
from mnemic.models.blocks import Block

UNTAUGHT = (
    "segments = 1: no gradient reaches what recurrent memory tokens write, for it is read in the next step; "
    "let a step read several, as --segments 4"
)

_segment = Within["Segment"]("segment")


@dataclass(frozen=True)
class Segment:
    """A segment that is being read into recurrent memory tokens: the rows' memory, and what the stack is not told."""

    state: Carried
    real: torch.Tensor | None = None  # (B, T), no padding
    starts: torch.Tensor | None = None  # (B, T), where documents start, for models that cannot keep them apart


class Attached(Handle):
    """Memory tokens in one model: `layer` has the vectors, `controllers` update them where the model does not.

    If encoder and decoder both have tokens, those of the decoder are in `decoder_layer`.
    """

    config: MemoryTokens

    def __init__(
        self, config: MemoryTokens, layer: MemoryTokenLayer, entrance: Entrance, head: PooledHead | None = None
    ) -> None:
        super().__init__(config)
        self.layer, self.controllers = layer, nn.ModuleList()
        self.head = head
        self.decoder_layer = copy.deepcopy(layer) if config.place == "both" else None
        if self.decoder_layer is not None:
            self.decoder_layer.redraw()
        self.entrance = entrance
        self._untaught = False  # whether training is to tell that what is written learns nothing
        self.shared: Carried | None = None  # what `read` has read, for all to look into
        self._blocks: list[ControlledBlock] | list[BottleneckBlock] = []

    @classmethod
    def attach(cls, config: MemoryTokens, places: Places, entrance: Entrance) -> Self:  # type: ignore[override]
        if config.place != "encoder" and places.decoder is None:
            raise UnsupportedModel(
                f"{type(places.stack).__name__} has no decoder beside an encoder: leave place at 'encoder'"
            )
        shape: Any = places.stack.config
        if config.positions == "fixed" and getattr(shape, "position", "") not in ("t5", "xl"):
            raise UnsupportedModel(
                f"{type(places.stack).__name__} does not take fixed positions of memory tokens: they are for mnemic's "
                "decoder with position = 't5' or 'xl', leave positions at 'relative'"
            )
        if config.segment:
            check_recurrent(places)
        inputs = places.sample_inputs()
        layer = MemoryTokenLayer(config.count, inputs.shape[1], inputs.std().item(), config.gated, config.segment > 0)
        handle = cls(config, layer.to(inputs.device), entrance, new_head(places) if config.pool else None)
        if config.variant != "plain":
            handle._control(places, inputs.device)
        handle.switch(True)
        return handle

    def _control(self, places: Places, device: torch.device) -> None:
        """Gives the memory layers of its own."""
        blocks = controlled(self.config, places)
        shape: Any = places.stack.config
        width: int = shape.hidden_size
        heads: int = shape.num_attention_heads
        head_dim = getattr(shape, "head_dim", None) or getattr(shape, "d_kv", None) or max(width // heads, 1)
        hidden = getattr(shape, "intermediate_size", None) or 4 * width
        like: dict[str, Any] = {"activation": F.gelu}
        if isinstance(blocks[0], Block):
            like = {"activation": blocks[0].mlp.activation, "dropout": blocks[0].dropout}
        shared = self.config.variant == "control-shared"
        self.controllers = nn.ModuleList(
            MemoryController(width, heads, head_dim, hidden, **like) for _ in range(1 if shared else len(blocks))
        ).to(device)
        causal = places.anatomy.kind == "causal"
        for number, block in enumerate(blocks):
            at = 0 if shared else number
            if self.config.variant in BOTTLENECKS:
                self._blocks.append(BottleneckBlock(self, at, block))  # type: ignore[arg-type]
            else:
                self._blocks.append(ControlledBlock(self, at, block, causal))  # type: ignore[arg-type]

    def switch(self, on: bool) -> None:
        if self.config.place != "decoder":
            by_key = self.config.variant in BOTTLENECKS
            fixed = self.config.positions == "fixed"
            prefix = Prefix(self._rows, self._bias, by_key, outputs=keep, written=self._written, fixed=fixed)
            self.entrance.prefix = prefix if on else None
        if self.config.place != "encoder":
            prefix = Prefix(self._decoder_rows, self._decoder_bias)
            self.entrance.of_decoder().prefix = prefix if on else None
        for block in self._blocks:
            block.switch(on)

    def change(self, **settings: Any) -> None:
        settings = {name: value for name, value in settings.items() if value != getattr(self.config, name)}
        if not settings:
            return
        free = {"count", "segment"} if settings.get("segment", 1) and self.config.segment else {"count"}
        if fixed := sorted(settings.keys() - free):
            raise UsageError(
                f"the memory tokens have learned with {fixed[0]} = {getattr(self.config, fixed[0])!r}: only their "
                "count can be changed, or detach() them"
            )
        self.config, self.shared = dataclasses.replace(self.config, **settings), None
        self.layer.resize(self.config.count)
        if self.decoder_layer is not None:
            self.decoder_layer.resize(self.config.count)

    def outputs(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        if self.head is None or self.entrance.prefix is None:
            return forward(**inputs)
        return labelled(self.head, self.entrance.places.stack.config, forward, inputs)

    def check_beside(self, others: Mapping[str, Handle]) -> None:
        if self.config.variant in BOTTLENECKS and "attention" in others:
            raise UsageError(
                "an attention memory keeps what a sequence attends to, and in a bottleneck that is nothing but memory "
                "tokens: give the model one of the two"
            )
        keys: Any = others.get("product_keys")
        if self.config.variant != "bottleneck-skip" or keys is None:
            return
        if skipped := [number for number in keys.numbers if number < len(self._blocks)]:
            raise UsageError(
                f"product keys in layer {skipped[0]} would never be read: with bottleneck-skip the sequence goes past "
                f"the encoder's layers. Put them into the decoder's, {len(self._blocks)} and later"
            )

    def unused(self) -> list[nn.Parameter]:
        replaced = self.entrance.places.text_head if self.head is not None else None
        head = [parameter for module in replaced or () for parameter in module.parameters()]
        return head + [parameter for block in self._blocks for parameter in block.unused()]

    # From segment to segment

    @property
    def segment(self) -> int | None:
        return self.config.segment or None

    @property
    def writes(self) -> bool:
        return self.config.segment > 0 and self.config.count > 0

    def new_state(self, rows: int) -> Carried | None:
        return Carried(rows, self.layer()) if self.config.segment else None

    def check_training(self, config: Any, kind: str) -> None:
        if not self.config.count:
            raise UsageError(
                "count = 0 is no memory, and nothing of it can be trained: give the memory tokens a count, or detach() "
                "them"
            )
        if not self.config.segment:
            return
        if self.shared is not None:
            raise UsageError(
                "the memory tokens have read a text, which would stand before every document that is trained on: "
                "reset() the memory first"
            )
        if config.batching != "documents":
            raise UsageError(
                f"batching = {config.batching!r} leaves recurrent memory tokens without the past of their documents: "
                "train with batching = documents, in which each row reads one on from batch to batch"
            )
        self.config = dataclasses.replace(self.config, segment=config.segment_length)
        self._untaught = config.segments == 1

    def tell(self) -> tuple[dict[str, float], list[str]]:
        told, self._untaught = [UNTAUGHT] if self._untaught else [], False
        return {}, told

    def run(self, forward: Callable[..., Any], inputs: dict[str, Any], reading: Reading) -> Any:
        state = (reading.state or {}).get("tokens")
        if state is None or self.entrance.prefix is None:
            return forward(**inputs)
        if len(state) != len(reading.targets):
            raise UsageError(
                f"a state of {len(state)} rows for a batch of {len(reading.targets)}: make one with new_state"
            )
        if state.written.shape[1] != self.config.count:
            raise UsageError(
                f"a state of {state.written.shape[1]} memory tokens where there are {self.config.count} now: make one "
                "with new_state"
            )
        apart = separates_documents(self.entrance.places)
        mask = inputs.get("attention_mask")
        with _segment.being(self, Segment(state, mask, None if apart else reading.document_starts)):
            return forward(**inputs | ({} if "past_key_values" in inputs else {"use_cache": False}))

    @property
    def reads(self) -> bool:
        return self.config.segment > 0

    @contextlib.contextmanager
    def taking_in(self, texts: int, real: torch.Tensor | None) -> Iterator[None]:
        if self.shared is not None and texts != len(self.shared):
            raise UsageError(READ_ON)
        state = self.shared or Carried(texts, self.layer())
        with _segment.being(self, Segment(state, real)):
            yield
        self.shared = state

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Within this context reading goes on from what was read, and at its end it is forgotten again."""
        before, self.shared = self.shared, copy.copy(self.shared)
        try:
            yield
        finally:
            self.shared = before

    def reset(self) -> None:
        self.shared = None

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.shared is None else self.shared.tensors()

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        loaded = None
        if state:
            loaded = Carried(len(state["begun"]), self.layer())
            loaded.load_tensors(state)
        self.shared = loaded

    def _written(self, states: torch.Tensor) -> None:
        """Takes what the stack gives for the memory behind a segment."""
        segment: Any = _segment.get(self)
        read = None if segment.real is None else segment.real.bool().any(1)
        ended = None if segment.starts is None else segment.starts[:, 1:].any(1)
        segment.state.write(states, read, ended)

    # The layer is looked up at each call: PEFT puts another in its place.

    def _rows(self, batch: int, starts: torch.Tensor | None) -> Vectors:
        segment, new = _segment.get(self), self.layer()
        if self.shared is not None and (segment is None or segment.state is not self.shared):
            new = self._memory(self.shared.shared_by(batch), new)
        if segment is None:
            return Vectors(new)
        memory = self._memory(segment.state, new)
        if segment.starts is not None:  # where documents cannot be kept apart, only those at the beginning are new
            starts = segment.starts[:, :1]
        if starts is None:
            return Vectors(memory, after=memory)
        last = torch.where(starts.any(1)[:, None, None], new, memory)
        if starts[:, 1:].any():
            return Vectors(memory, begun=new, after=last)
        return Vectors(last, after=last)

    def _memory(self, state: Carried, new: torch.Tensor) -> torch.Tensor:
        """The memory (B, m, d) before the next segment of each row; a new one in rows that begin anew."""
        return torch.where(state.begun[:, None, None], self.layer.following(state.written), new)

    def _bias(self) -> torch.Tensor | None:
        return self.layer.bias()

    def _decoder_rows(self, batch: int, starts: torch.Tensor | None) -> Vectors:
        return Vectors((self.decoder_layer or self.layer)())

    def _decoder_bias(self) -> torch.Tensor | None:
        return (self.decoder_layer or self.layer).bias()


def check_recurrent(places: Places) -> None:
    """UnsupportedModel if what a memory writes cannot go from segment to segment."""
    if places.anatomy.kind != "causal":
        raise UnsupportedModel(
            f"{type(places.stack).__name__} is not causal: recurrent memory tokens go from segment to segment of what "
            "a decoder reads, leave segment at 0"
        )


def controlled(config: MemoryTokens, places: Places) -> list[nn.Module]:
    """The blocks beside which the memory has a layer of its own.

    All, if a decoder or a head reads the memory in the end; if not, all but the last, after which nobody reads it.
    """
    name = type(places.stack).__name__
    encodes = places.decoder is not None
    if config.variant in BOTTLENECKS and not (encodes and all(isinstance(block, Block) for block in places.blocks)):
        raise UnsupportedModel(
            f"{name} cannot have a bottleneck of memory tokens: that is for mnemic's encoder-decoder, give other "
            "models variant = 'plain' or 'control'"
        )
    blocks = places.blocks if encodes or config.pool else places.blocks[:-1]
    if not blocks:
        raise UnsupportedModel(
            f"{name} has one layer, and nobody reads what the memory is after it: leave variant at 'plain'"
        )
    return blocks
