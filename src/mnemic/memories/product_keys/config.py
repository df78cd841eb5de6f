"""Settings of the product-key memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from mnemic.config import option
from mnemic.errors import UsageError
from mnemic.memories.config import MemoryConfig


@dataclass(kw_only=True)
class ProductKeys(MemoryConfig):
    """Trainable slots by the hundred thousand in the feed-forward layers (arXiv 1907.05242, 2010.03881).

    Beside the feed-forward of a pretrained model (ResM):   ProductKeys()
    The same, and the model starts out as it was:           ProductKeys.pretrained()
    In place of the feed-forward (PKM):                     ProductKeys.pkm()
    """

    starts: ClassVar[dict[str, dict[str, Any]]] = {
        "pretrained": {"start": "zeros"},
        "pkm": {"feed_forward": "replace"},
    }

    layers: list[int] = option(
        [],
        "the layers with a memory, counted from 0, a decoder's on from its encoder's; none: two, at a third and at two "
        "thirds of the depth, as the 4th and the 8th of 12",
    )
    slots: int = option(262_144, "rows of the table of values (|K| = C^2): the square of a whole number")
    heads: int = option(4, "queries that each token asks (H); all heads read one table")
    k: int = option(32, "slots that each head reads (the paper's k)")
    key_dim: int = option(256, "width of queries and keys; each half of a key has half of it")
    feed_forward: Literal["keep", "replace", "renew"] = option(
        "keep",
        "the layer's own feed-forward: keep it and add the memory to it (ResM), replace it by the memory (PKM), or add "
        "the memory to one with new weights (ResM')",
    )
    start: Literal["normal", "zeros"] = option(
        "normal",
        "how values begin: normal, as in the paper; zeros, so that a kept feed-forward is at first all there is",
    )
    query_norm: Literal["auto", "batch", "layer", "none"] = option(
        "auto",
        "how queries are normalised: batch, over the tokens of a batch, which lets later tokens touch earlier ones in "
        "training; layer, each alone; auto: layer in causal models and decoders, batch in others",
    )
    shared: bool = option(False, "whether all layers read one table of values")
    gated: bool = option(
        False, "whether what was read goes through a gate that depends on the token (arXiv 2412.09764)"
    )
    cosine: bool = option(False, "whether queries and keys are compared by cosine, with a learned scale for each head")
    dtype: Literal["float32", "bfloat16"] = option("float32", "how values are kept")
    kept: list[int] = option(
        [], "how many slots of each table still have a value, layer by layer: what pruning left; none: all have one"
    )

    def check(self) -> None:
        for name, least in (("slots", 1), ("heads", 1), ("k", 1), ("key_dim", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"ProductKeys.{name} = {getattr(self, name)}: expected {least} or more")
        side = math.isqrt(self.slots)
        if side**2 != self.slots:
            raise UsageError(
                f"ProductKeys.slots = {self.slots}: expected the square of a whole number, as {side**2} or "
                f"{(side + 1) ** 2}"
            )
        if self.k > self.slots:
            raise UsageError(f"ProductKeys.k = {self.k}: there are only {self.slots} slots to read")
        if self.key_dim % 2:
            raise UsageError(f"ProductKeys.key_dim = {self.key_dim}: expected an even number, a key has two halves")
        if len(set(self.layers)) < len(self.layers):
            raise UsageError(f"ProductKeys.layers = {self.layers}: a layer has one memory, name each once")
        if wrong := [count for count in self.kept if not 1 <= count <= self.slots]:
            raise UsageError(f"ProductKeys.kept = {self.kept}: {wrong[0]} of {self.slots} slots cannot be kept")
        if tables := 1 if self.shared else len(self.layers):
            self.check_tables(tables)

    def check_tables(self, tables: int) -> None:
        """UsageError if pruning left another number of tables."""
        if self.kept and len(self.kept) != tables:
            raise UsageError(
                f"ProductKeys.kept = {self.kept}: expected a number for each of {tables} tables of values, or none"
            )

    def usual_layers(self, depth: int) -> list[int]:
        """The layers with a memory in a model of so many, if none are named."""
        return sorted({max(depth // 3 - 1, 0), max(2 * depth // 3 - 1, 0)})

    @classmethod
    def pretrained(cls, **settings: object) -> Self:
        """A memory beside the feed-forward of a pretrained model that leaves it as it is until it has learned."""
        return cls(**cls.starts["pretrained"] | settings)

    @classmethod
    def pkm(cls, **settings: object) -> Self:
        """A memory in place of the feed-forward (arXiv 1907.05242)."""
        return cls(**cls.starts["pkm"] | settings)

    @classmethod
    def small(cls, layers: int) -> Self:
        return cls(layers=[layers - 1], slots=1024, heads=2, k=8, key_dim=32)

    def neutral(self) -> Self:
        return dataclasses.replace(self, start="zeros", feed_forward="keep")
