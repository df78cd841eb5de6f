"""Memory tokens go before the input of the model's stack; of a sequence-to-sequence model encoder, decoder or both."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from mnemic.errors import UnsupportedModel, UsageError
from mnemic.hf.anatomy import Places
from mnemic.hf.entrance import Entrance, Prefix
from mnemic.memories.base import Handle
from mnemic.memories.tokens.blocks import BottleneckBlock, ControlledBlock
from mnemic.memories.tokens.config import BOTTLENECKS, MemoryTokens
from mnemic.memories.tokens.layer import MemoryController, MemoryTokenLayer, PooledHead
from mnemic.memories.tokens.pooling import keep, labelled, new_head
from mnemic.models.blocks import Block


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
        inputs = places.sample_inputs()
        layer = MemoryTokenLayer(config.count, inputs.shape[1], inputs.std().item(), config.gated)
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
            prefix = Prefix(rows=self._rows, bias=self._bias, by_key=by_key, outputs=keep, fixed=fixed)
            self.entrance.prefix = prefix if on else None
        if self.config.place != "encoder":
            prefix = Prefix(rows=self._decoder_rows, bias=self._decoder_bias)
            self.entrance.of_decoder().prefix = prefix if on else None
        for block in self._blocks:
            block.switch(on)

    def change(self, **settings: Any) -> None:
        settings = {name: value for name, value in settings.items() if value != getattr(self.config, name)}
        if not settings:
            return
        if fixed := sorted(settings.keys() - {"count"}):
            raise UsageError(
                f"the memory tokens have learned with {fixed[0]} = {getattr(self.config, fixed[0])!r}: only their "
                "count can be changed, or detach() them"
            )
        self.config = dataclasses.replace(self.config, **settings)
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

    # The layer is looked up at each call: PEFT puts another in its place.

    def _rows(self) -> torch.Tensor:
        return self.layer()

    def _bias(self) -> torch.Tensor | None:
        return self.layer.bias()

    def _decoder_rows(self) -> torch.Tensor:
        return (self.decoder_layer or self.layer)()

    def _decoder_bias(self) -> torch.Tensor | None:
        return (self.decoder_layer or self.layer).bias()


def controlled(config: MemoryTokens, places: Places) -> list[nn.Module]:
    """The blocks beside which the memory has a layer of its own.

    All, if a decoder or a head reads the memory in the end; if not, all but the last, after which nobody reads it.
    """
    name = type(places.stack).__name__
    encodes = places.decoder is not None or places.anatomy.kind == "seq2seq"
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
