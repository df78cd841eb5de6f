"""The settings of a table at one size: a TOML file, which may be like another one but for a few changes."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tables.drill import Drill
from tables.pretrained import PRETRAINED
from tables.texts import Text

from mnemic.config import Config, option
from mnemic.errors import UsageError, unknown_name
from mnemic.evaluate.config import EvaluateConfig
from mnemic.stores.build_config import BuildConfig
from mnemic.train.config import TrainConfig

LIKE = "like"


@dataclass(kw_only=True)
class Settings(Config):
    """What is trained on what, how it is tested, and with how large a memory."""

    home: dict[str, Any] = option({}, "the text that models are trained on: see Text")
    other: dict[str, Any] = option({}, "a text of another domain, if the table has one")
    tested: str = option("home", "which of the two is tested on")
    split: str | None = option(None, "the split that is tested on; unset: that of the table's columns")
    model: str = option(
        "decoder", "as in `mnemic train --model`, or transformers:gpt2, or masked:bert, or pretrained:smollm2-135m"
    )
    model_settings: dict[str, Any] = option({}, "settings of the model that differ")
    sinusoids: float = option(0.0, "the amplitude of sinusoids that GPT-2's positions begin as; 0: at random, as usual")
    tokenizer: str = option("word", "bpe, word or byte, trained on the home text")
    vocab_size: int | None = option(None, "size of its vocabulary; unset: all words")
    train: dict[str, Any] = option({}, "how models are trained: see TrainConfig; `batching` holds for all of them")
    finetune: dict[str, Any] = option({}, "what differs from that for models that go on from another one")
    drill: dict[str, Any] = option({}, "how new models learn to look back first, if they do: see Drill")
    consecutive: int = option(1, "consecutive segments in a batch, for models trained with long-term memory (m)")
    local_dropout: float = option(0.9, "how often models trained with external memory go without their local one (p)")
    evaluate: dict[str, Any] = option({}, "how models are tested: see EvaluateConfig")
    tune: dict[str, Any] = option({}, "what differs from that in tuning, such as max_tokens")
    store: dict[str, Any] = option({}, "how stores are built: see BuildConfig")
    memory: dict[str, int] = option({}, "sizes of attention memories, by the names that rows give them")
    product_keys: dict[str, Any] = option({}, "sizes of product-key memories: see ProductKeys")
    tasks: dict[str, Any] = option(
        {}, "tasks that models are fine-tuned on, and what differs from Table 3: fine_tuning"
    )
    long: int = option(0, "the largest long-term memory that is tried in testing")
    k: int = option(1024, "the most rows of a store that are tried in testing (K)")
    seeds: list[int] = option([0], "seeds of the models")
    variants: dict[str, Any] = option({}, "name -> what differs from all this in some rows of the table")

    def check(self) -> None:
        """Raises an error for what the parts themselves refuse."""
        if not self.model.startswith(PRETRAINED):  # one that others have trained may need no text
            self.text("home")
        for config, settings in (
            (TrainConfig, self.train),
            (TrainConfig, self.train | self.finetune),
            (Drill, self.drill),
            (EvaluateConfig, self.evaluate),
            (EvaluateConfig, self.tune),
        ):
            config.from_dict(settings)
        BuildConfig.from_dict({**self.store, "dim": 1})
        for name in self.variants:
            self.varied(name)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The settings in a file."""
        return cls.from_dict(_read(path))

    def text(self, name: str) -> Text:
        """The text `home` or `other`."""
        settings = {"home": self.home, "other": self.other}[name]
        if not settings:
            raise UsageError(f"the settings name no {name} text: give a table [{name}] with a corpus")
        return Text.from_dict(settings)

    def varied(self, variant: str) -> Settings:
        """The settings with the changes of a variant, or of several as in "books+xl"; as they are if there is none."""
        values = {name: value for name, value in self.to_dict().items() if name != "variants"}
        for name in filter(None, variant.split("+")):
            if name not in self.variants:
                raise unknown_name("variant", name, self.variants)
            values = _merged(values, self.variants[name])
        return Settings.from_dict(values)

    def has(self, variant: str) -> bool:
        """Whether all of a variant is there."""
        return all(name in self.variants for name in filter(None, variant.split("+")))


def identity(*parts: Any) -> str:
    """A short name for settings: the same for the same ones."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such settings: {path}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    like = values.pop(LIKE, None)
    return values if like is None else _merged(_read(path.parent / like), values)


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values with changes, table by table."""
    merged = dict(values)
    for name, change in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, change) if isinstance(old, dict) and isinstance(change, dict) else change
    return merged
