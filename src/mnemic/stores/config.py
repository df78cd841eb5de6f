"""The settings of a store, and what its rows were made from."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mnemic.config import Config, option
from mnemic.errors import UsageError


@dataclass(kw_only=True)
class Origin(Config):
    """What made the rows of a store; opening it for anything else is refused."""

    model: str = option("", "name of the model that made the keys")
    model_fingerprint: str = option("", "checksum of its weights")
    memory_fingerprint: str = option("", "checksum of the memories in it")
    tokenizer: str = option("", "name of the tokenizer")
    tokenizer_fingerprint: str = option("", "checksum of its vocabulary and rules")
    layer: str = option("", "the module whose input the keys are")
    corpus: str = option("", "the text that was read")
    context: int = option(0, "tokens a key could look back on, 0 if unknown")


@dataclass(kw_only=True)
class StoreConfig(Config):
    """How rows are kept and found. All of it is fixed when a store is made, but for `recall`."""

    dim: int = option(0, "numbers in a key")
    metric: Literal["l2", "ip", "cosine"] = option("l2", "nearest by squared distance, inner product or cosine")
    keys: Literal["float16", "float32", "codes"] = option(
        "float16", "how keys are kept; codes: only in the index, far smaller, but half of the true nearest are missed"
    )
    index: str = option("auto", "auto (chosen from the number of rows), exact, or a FAISS factory string")
    transform: Literal["", "opq", "pca"] = option(
        "", "before a compressed index: turn (opq) or halve (pca) the vectors"
    )
    recall: float = option(0.95, "share of the true nearest 32 rows that a search shall find")
    origin: dict[str, str | int] = option({}, "what made the rows: see Origin")

    def check(self) -> None:
        """Refuses settings that cannot work."""
        if not 1 <= self.dim <= 65536:
            raise UsageError(f"dim = {self.dim}: expected 1 to 65536 numbers in a key")
        if not 0 < self.recall <= 1:
            raise UsageError(f"recall = {self.recall}: expected a number above 0 and up to 1")
        if self.keys == "codes" and self.index == "exact":
            raise UsageError("index = 'exact' needs the keys: choose keys = 'float16' or 'float32'")
        if len(self.index) > 200:  # FAISS's parser crashes on long texts
            raise UsageError(f"index = {self.index[:80]!r}...: expected a factory string of at most 200 letters")
        if any(len(number) > 7 or int(number) > 1 << 22 for number in re.findall(r"\d+", self.index)):
            raise UsageError(f"index = {self.index[:80]!r}: expected no number above {1 << 22}")
        Origin.from_dict(dict(self.origin))


def without_names(config: StoreConfig, names: Iterable[str]) -> StoreConfig:
    """The settings without what they say of the text that was read, if that names one of these."""
    try:
        said = [str(value) for value in json.loads(str(config.origin.get("corpus", ""))).values()]
    except (ValueError, AttributeError):
        said = [str(config.origin.get("corpus", ""))]
    if not any(text == name or text.endswith(f"/{name}") for text in said for name in names):
        return config
    return dataclasses.replace(config, origin={n: value for n, value in config.origin.items() if n != "corpus"})
