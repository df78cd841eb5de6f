"""Settings of the attention memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from mnemic.config import option
from mnemic.errors import UsageError
from mnemic.memories.config import MemoryConfig, absolute


@dataclass(kw_only=True)
class KNNAttention(MemoryConfig):
    """Keys and values of what was read, found by kNN in single layers: Memorizing Transformers (arXiv 2203.08913).

    A model that is trained from the start, as in the paper:   KNNAttention()
    A pretrained model that learns to use a memory:            KNNAttention.pretrained()
    A pretrained model that uses one without training:         KNNAttention.as_context()
    """

    key: ClassVar[str] = "attention"  # the layer of which a store's rows must be

    starts: ClassVar[dict[str, dict[str, Any]]] = {
        "pretrained": {"mix": "tanh", "normalise": "memory"},
        "as_context": {"mix": "joint", "normalise": "none", "distance": 256, "size": 16_384},
    }

    layers: list[int] = option(
        [],
        "the layers with a memory, counted from 0; none: one, at three quarters of the depth, or, where nothing is "
        "normalised, the upper three quarters of them",
    )
    k: int = option(32, "how many pairs each query of each head finds")
    size: int = option(65_536, "how many pairs of its document each row keeps; the oldest go first; 0: none")
    dtype: Literal["float32", "float16"] = option("float32", "how pairs are kept")
    mix: Literal["gate", "tanh", "joint"] = option(
        "gate",
        "how memory and context are mixed: gate, sigmoid(b) of each head; tanh, tanh(b), which starts without effect; "
        "joint, one softmax over both, the memory's scores raised by b",
    )
    normalise: Literal["all", "memory", "none"] = option(
        "all",
        "where queries and keys are normalised, with a learned scale: all, in the context too, as in the paper; "
        "memory, in the memory only, which leaves a pretrained layer as it is; none, nowhere, so that pairs have the "
        "scores that they would have in the context",
    )
    scale: float = option(0.0, "at which the learned scale of scores begins; 0: 10 if normalised, else the model's own")
    distance: int = option(
        0, "how far before each query retrieved pairs seem to stand to a model with rotary positions; others know none"
    )
    dense: bool = option(False, "whether a query attends to the whole memory in place of the k nearest pairs")
    search: Literal["auto", "exact", "lists"] = option(
        "auto",
        "how the nearest are found: exact; lists, around points that are learned from the keys (FAISS); auto: lists on "
        "a CPU for a size above 8,192",
    )
    external: str | None = option(
        None, "the address of a store of pairs that a model has read before (layer = attention), for all to look into"
    )
    xl_length: int = option(
        0,
        "how many tokens of earlier segments stay in the context, as an XL cache in every layer; for models with "
        "rotary positions that have none of their own",
    )
    recall: float = option(0.95, "share of the true nearest pairs that lists shall find")

    def __post_init__(self) -> None:
        self.store: Any = None  # an open store, if one was given in place of its address
        if hasattr(self.external, "search"):
            self.store, self.external = self.external, self.external.address  # type: ignore[union-attr]
        super().__post_init__()

    def check(self) -> None:
        for name, least in (("k", 1), ("size", 0), ("xl_length", 0), ("distance", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"KNNAttention.{name} = {getattr(self, name)}: expected {least} or more")
        if not 0 <= self.scale < math.inf:
            raise UsageError(f"KNNAttention.scale = {self.scale}: expected a number above 0, or 0 for the usual one")
        if not 0 < self.recall <= 1:
            raise UsageError(f"KNNAttention.recall = {self.recall}: expected a number above 0 and up to 1")
        if self.dense and self.search == "lists":
            raise UsageError("KNNAttention: dense attends to all pairs, and lists are for finding a few: choose one")
        if len(set(self.layers)) < len(self.layers):
            raise UsageError(f"KNNAttention.layers = {self.layers}: a layer has one memory, name each once")

    def for_keys(self) -> dict[str, Any]:
        return {"layers": self.layers, "normalise": self.normalise}

    def usual_layers(self, depth: int) -> list[int]:
        """The layers with a memory in a model of so many, if none are named."""
        return list(range((depth + 2) // 4, depth)) if self.normalise == "none" else [max(depth * 3 // 4 - 1, 0)]

    def saved(self) -> dict[str, Any]:
        return self.to_dict() | {"external": absolute(self.external)}

    @property
    def cached(self) -> int:
        return self.xl_length

    @classmethod
    def pretrained(cls, **settings: object) -> Self:
        """A memory that leaves a pretrained model as it is until it has learned to use it."""
        return cls(**cls.starts["pretrained"] | settings)

    @classmethod
    def as_context(cls, **settings: object) -> Self:
        """A memory that a pretrained model looks into as into its context, in one softmax with it, without training."""
        return cls(**cls.starts["as_context"] | settings)

    @classmethod
    def small(cls, layers: int) -> Self:
        return cls(layers=[layers - 1], k=8, size=2048)

    def neutral(self) -> Self:
        return dataclasses.replace(self, mix="tanh", normalise="memory", external=None)
