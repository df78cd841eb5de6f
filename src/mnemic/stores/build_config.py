"""The settings of a build, and the record of which text it read; importing it needs no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from mnemic.config import Config, option
from mnemic.errors import UsageError
from mnemic.stores.config import Origin, StoreConfig


@dataclass(kw_only=True)
class BuildConfig(StoreConfig):
    """What becomes the rows of a store, and how they are kept. `dim` and `origin` come from the model and the text."""

    metric: Literal["auto", "l2", "ip", "cosine"] = option(  # type: ignore[assignment]
        "auto",
        "nearest by squared distance, inner product or cosine; auto: as the model's output memory compares, or l2",
    )
    layer: str = option(
        "auto",
        "whose input is the key: ffn (the last feed-forward), ffn:3 (block 3's), output (the head), or a module; "
        "attention: the pairs of the model's attention memory; auto: as in the model's output memory, or ffn",
    )
    split: str = option("train", "the part of the corpus to read: train, valid, test or all")
    window: int | None = option(
        None,
        "tokens that the model reads at once, or longest pair that it reads; unset: 512, or what it has positions for",
    )
    min_context: int | None = option(
        None, "tokens that each key looks back on, if its document has them; unset: half of the window, 0 is fastest"
    )
    batch_size: int = option(8, "windows at once, or as many pairs as they hold; a build goes on only with the same")
    namespace: str = option("default", "whom the rows belong to: a user, a domain, a set of documents")
    max_probability: float = option(
        1.0, "leave out rows whose token the model itself gives a higher probability than this; 1 keeps all"
    )
    commit_rows: int = option(100_000, "rows after which what is done so far is made durable")
    tokens: str | None = option(None, "folder that keeps the tokenised text, so that going on does not tokenise again")
    resume: bool = option(True, "go on with what is there; without it, a store that has rows is refused")

    def check(self) -> None:
        """Refuses settings that cannot work."""
        self.store_config(self.dim or 1)
        for name, least in (("window", 1), ("min_context", 0), ("batch_size", 1), ("commit_rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} = {value}: expected {least} or more")
        if self.window is not None and (self.min_context or 0) >= self.window:
            raise UsageError(f"min_context = {self.min_context}: expected less than window = {self.window}")
        if not 0 < self.max_probability <= 1:
            raise UsageError(f"max_probability = {self.max_probability}: expected a number above 0 and up to 1")

    def store_config(self, dim: int, origin: Origin | None = None) -> StoreConfig:
        """The settings of the store itself."""
        settings = {name: getattr(self, name) for name in StoreConfig.types()}
        settings["metric"] = "l2" if self.metric == "auto" else self.metric
        if origin is not None:
            settings["origin"] = {name: value for name, value in origin.to_dict().items() if value and name != "schema"}
        return StoreConfig(**{**settings, "dim": dim})


@dataclass(kw_only=True)
class Reading(Config):
    """Which text became the rows of a store, and how it was read: all that must stay the same for a build to go on."""

    corpus: str = option("", "name or path of the corpus")
    split: str = option("", "the part of it that was read")
    text: str = option("", "checksum of its documents and tokens")
    window: int = option(0, "tokens that the model read at once")
    min_context: int = option(0, "tokens that each key looks back on at least")
    batch_size: int = option(0, "windows at once")
    namespace: str = option("", "whom the rows belong to")
    max_probability: float = option(1.0, "rows whose token the model gave more were left out")

    @classmethod
    def of(cls, origin: Origin) -> Reading | None:
        """What a store's origin says of its text; None if no build has made it."""
        try:
            return cls.from_dict(json.loads(origin.corpus))
        except (ValueError, TypeError, UsageError):
            return None

    def text_for_origin(self) -> str:
        """As it stands in a store's origin."""
        return json.dumps({name: value for name, value in self.to_dict().items() if name != "schema"})


def suited(config: BuildConfig, model: Any) -> BuildConfig:
    """The settings with what is left open as the model's output memory has it, or as usual."""
    memory = getattr(getattr(getattr(model, "memory", None), "output", None), "config", None)
    metric = "ip" if memory is not None and memory.similarity == "dot" else "l2"
    left_open: dict[str, Any] = {"metric": metric, "layer": "ffn" if memory is None else memory.key}
    if config.layer == "attention":  # its rows are loaded as they are, and searched by the memory itself
        left_open |= {"metric": "ip", "index": "exact"}
    return dataclasses.replace(
        config, **{name: value for name, value in left_open.items() if getattr(config, name) == "auto"}
    )
