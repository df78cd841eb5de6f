"""Settings of the output memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from mnemic.config import option
from mnemic.errors import UsageError
from mnemic.memories.config import MemoryConfig, absolute


@dataclass(kw_only=True)
class OutputMemory(MemoryConfig):
    """Contexts and the tokens that followed them, at the softmax: TRIME, kNN-LM, continuous cache (arXiv 2205.12674).

    The three systems of the paper and its baselines are settings of one thing:

        plain model         OutputMemory(local=False, training="none")
        continuous cache    OutputMemory.cache(long=...)
        kNN-LM              OutputMemory.knn("wiki.store")
        TRIME               OutputMemory()
        TRIME long          OutputMemory(long=15_000, training="consecutive")
        TRIME ext           OutputMemory(training="batch"), and once it is trained and has made a store,
                            OutputMemory(long=..., external="wiki.store", weight=0.3)
    """

    local: bool = option(True, "whether the tokens of the same input are a memory (M_local)")
    long: int = option(0, "how many earlier tokens of the same document are a memory (M_long)")
    external: str | None = option(None, "the address of a store whose rows are a memory (M_ext)")
    k: int = option(1024, "how many rows of the store are found for each token (K)")
    retrieve: float = option(
        1.0, "share of the tokens that the store is searched for: those where a gate, which tuning learns, expects most"
    )
    recall: float | None = option(
        None, "share of the true nearest rows that a search shall find: less is faster; unset: what the store says"
    )
    follow: int = option(
        0,
        "for how many tokens after a search the rows found are followed in their text in place of searching again; 0: "
        "every token is searched for, as in generation always",
    )
    overlap: bool = option(False, "whether the store is searched in a thread of its own while the model goes on")
    namespaces: list[str] = option([], "the namespaces of the store to look into; all if there are none")
    key: str = option("ffn", "what a context is compared by: ffn, the input of the last feed-forward, or output")
    similarity: Literal["auto", "dot", "distance"] = option(
        "auto", "dot: q k / sqrt(d), as in TRIME; distance: -|q - k|^2; auto: what the store compares by, or dot"
    )
    joint: bool = option(True, "whether the memory is in the softmax over the vocabulary (Eq. 5, 6)")
    temperature: float = option(1.0, "of the memory in that softmax when testing (tau)")
    weight: float = option(0.0, "of the memory's own distribution, mixed with that softmax when testing (lambda)")
    mix_temperature: float = option(1.0, "of the memory's own distribution (tau')")
    recent_weight: float | None = option(
        None, "share of local and long-term memory in `weight`, as a distribution apart from the store's; unset: one"
    )
    recent_temperature: float | None = option(
        None, "temperature of local and long-term memory, where they are a distribution apart; unset: mix_temperature"
    )
    training: Literal["none", "local", "previous", "consecutive", "batch"] = option(
        "local",
        "memory in training: none; local; previous, the segment before as well, as it was then; consecutive, earlier "
        "segments in the batch; batch, all of it",
    )
    local_dropout: float = option(0.9, "how often a segment goes without its local memory, if training = batch (p)")
    plain_start: float = option(0.05, "share of the training steps at the start without memory")
    memory_gradient: bool = option(True, "whether training changes the memory's keys too, not the queries alone")

    def __post_init__(self) -> None:
        self.store: Any = None  # an open store, if one was given in place of its address
        if hasattr(self.external, "search"):
            self.store, self.external = self.external, self.external.address  # type: ignore[union-attr]
        if self.similarity == "auto" and self.external is None:
            self.similarity = "dot"
        super().__post_init__()

    def check(self) -> None:
        for name, least in (("long", 0), ("k", 1), ("follow", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"OutputMemory.{name} = {getattr(self, name)}: expected {least} or more")
        for name in ("temperature", "mix_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"OutputMemory.{name} = {getattr(self, name)}: expected a number above 0")
        if self.recent_temperature is not None and not 0 < self.recent_temperature < math.inf:
            raise UsageError(f"OutputMemory.recent_temperature = {self.recent_temperature}: expected a number above 0")
        for name in ("retrieve", "local_dropout", "plain_start", "recent_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"OutputMemory.{name} = {value}: expected a number from 0 to 1")
        if self.recall is not None and not 0 < self.recall <= 1:
            raise UsageError(f"OutputMemory.recall = {self.recall}: expected a number above 0 and up to 1")
        if not 0 <= self.weight < 1:
            raise UsageError(f"OutputMemory.weight = {self.weight}: expected 0 or more and less than 1")
        if not self.joint and self.training != "none":
            raise UsageError("OutputMemory.joint = False: training puts the memory in the softmax; set training = none")

    @classmethod
    def cache(cls, long: int = 0, weight: float = 0.1, temperature: float = 1.0, **changes: Any) -> Self:
        """A continuous cache: what was read lately, mixed in when testing only."""
        return cls(long=long, joint=False, weight=weight, mix_temperature=temperature, training="none", **changes)

    @classmethod
    def knn(cls, store: str | None, weight: float = 0.25, temperature: float = 1.0, **changes: Any) -> Self:
        """kNN-LM: the nearest rows of a store, mixed in when testing only."""
        settings = {"local": False, "similarity": "distance", "joint": False, "training": "none", **changes}
        return cls(external=store, weight=weight, mix_temperature=temperature, **settings)

    @classmethod
    def small(cls, layers: int) -> Self:
        return cls(weight=0.3, mix_temperature=0.5)

    def changed(self, **settings: Any) -> Self:
        """The same memory, with the same open store if it was given one, with other settings."""
        other = dataclasses.replace(self, **settings)
        if "external" not in settings:
            other.store = self.store
        return other

    def saved(self) -> dict[str, Any]:
        return self.to_dict() | {"external": absolute(self.external)}

    def neutral(self) -> Self:
        return dataclasses.replace(self, local=False, long=0, external=None)
