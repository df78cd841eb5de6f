"""Settings of the memory tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from mnemic.config import option
from mnemic.errors import UsageError
from mnemic.memories.config import MemoryConfig

BOTTLENECKS = ("bottleneck", "bottleneck-skip")


@dataclass(kw_only=True)
class MemoryTokens(MemoryConfig):
    """Trainable [mem] vectors before the input, which the sequence reads and writes (arXiv 2006.11527).

    MemTransformer, in any model:                   MemoryTokens(count=10)
    MemCtrl, the memory with layers of its own:     MemoryTokens.control(count=20)
    MemBottleneck, the sequence reads nothing else: MemoryTokens.bottleneck(count=20)
    Recurrent, on from segment to segment:          MemoryTokens.recurrent(count=10)
    """

    starts: ClassVar[dict[str, dict[str, Any]]] = {
        "control": {"variant": "control"},
        "control_shared": {"variant": "control-shared"},
        "bottleneck": {"variant": "bottleneck"},
        "bottleneck_skip": {"variant": "bottleneck-skip"},
        "recurrent": {"segment": 128},
    }

    count: int = option(
        10,
        "how many [mem] tokens are put before the input (the paper's m); on a trained model fewer leave its last ones "
        "(a lesion, 0 all out) and more add new ones, to be trained (an extension)",
    )
    place: Literal["encoder", "decoder", "both"] = option(
        "encoder", "of a sequence-to-sequence model, before whose input they stand; with both each has its own"
    )
    positions: Literal["relative", "fixed"] = option(
        "relative",
        "in mnemic's decoder with relative positions (t5, xl), how far they are from a token: as its place in the "
        "document says, or fixed, as far from every token as from the first",
    )
    variant: Literal["plain", "control", "control-shared", "bottleneck", "bottleneck-skip"] = option(
        "plain",
        "what updates the memory: plain, the model's own layers (MemTransformer); control, a layer of its own beside "
        "each (MemCtrl), or one for all (control-shared); bottleneck, the same, and the sequence reads nothing but the "
        "memory (MemBottleneck), or is left as it is (bottleneck-skip): in mnemic's encoder-decoder only",
    )
    gated: bool = option(
        False, "give each token a trainable gate that starts closed: the model starts out exactly as its base"
    )
    pool: bool = option(
        False,
        "label a whole text by the maximum and the mean of the [mem] tokens' outputs, through a new layer, instead of "
        "by [CLS] (the paper's +pool); for encoders with a head for sequence classification",
    )
    segment: int = option(
        0,
        "recurrent memory, in causal models with variant = plain: what stands behind a segment of so many tokens, and "
        "has read all of it, goes before the next segment of the document; training sets it to its segment_length. 0: "
        "the memory ends with what is read at once",
    )

    def check(self) -> None:
        if self.count < 0:
            raise UsageError(f"MemoryTokens.count = {self.count}: expected 0 or more")
        if self.segment < 0:
            raise UsageError(f"MemoryTokens.segment = {self.segment}: expected the tokens of a segment, or 0")
        if self.variant != "plain" and self.place != "encoder":
            raise UsageError(
                f"MemoryTokens.place = {self.place!r}: layers of the memory's own (variant = {self.variant!r}) are for "
                "encoders, leave place at 'encoder' or variant at 'plain'"
            )
        if self.variant in BOTTLENECKS and self.gated:
            raise UsageError(
                "MemoryTokens.gated = true closes the memory, and in a bottleneck there is nothing else to read: leave "
                "one of the two out"
            )
        if self.pool and not self.count:
            raise UsageError("MemoryTokens.count = 0: there is no memory to label a text by, leave pool at false")
        if self.variant in BOTTLENECKS and not self.count:
            raise UsageError(
                "MemoryTokens.count = 0: a bottleneck has nothing but the memory to read, leave at least one token"
            )
        if self.segment and (self.variant != "plain" or self.place != "encoder" or self.pool):
            raise UsageError(
                f"MemoryTokens.segment = {self.segment} is for causal models, whose own layers write the memory: leave "
                "variant at 'plain', place at 'encoder' and pool at false"
            )

    @classmethod
    def control(cls, **settings: object) -> Self:
        """A memory with a layer of its own beside each of the model's (MemCtrl)."""
        return cls(**cls.starts["control"] | settings)

    @classmethod
    def control_shared(cls, **settings: object) -> Self:
        """A memory with one layer of its own beside all of the model's (MemCtrl Shared)."""
        return cls(**cls.starts["control_shared"] | settings)

    @classmethod
    def bottleneck(cls, **settings: object) -> Self:
        """A memory that is all the sequence reads (MemBottleneck), in mnemic's encoder-decoder."""
        return cls(**cls.starts["bottleneck"] | settings)

    @classmethod
    def bottleneck_skip(cls, **settings: object) -> Self:
        """A memory that reads a sequence which is left as it is (MemBottleneck Skip), in mnemic's encoder-decoder."""
        return cls(**cls.starts["bottleneck_skip"] | settings)

    @classmethod
    def recurrent(cls, **settings: object) -> Self:
        """A memory that goes from segment to segment of a document, in causal models."""
        return cls(**cls.starts["recurrent"] | settings)

    @classmethod
    def small(cls, layers: int) -> Self:
        return cls(count=4)

    def neutral(self) -> Self:
        # a new head cannot say what the old one did, and a bottleneck has nothing else to read
        variant = "plain" if self.variant in BOTTLENECKS else self.variant
        return dataclasses.replace(self, gated=True, variant=variant, pool=False)

    def for_keys(self) -> dict[str, Any]:
        # as it was before there was a choice, in stores of that time
        usual = {"place": "encoder", "positions": "relative", "variant": "plain"}
        known = {name: value for name, value in self.to_dict().items() if name not in ("pool", "segment")}
        return {name: value for name, value in known.items() if usual.get(name) != value}
